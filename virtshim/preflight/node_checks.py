"""Checks of a node's other parts: kubelet, container runtime, clock, sockets of the daemons, QEMU's memory, RuntimeClasses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from virtshim.config.settings import Settings
from virtshim.devices.host_files import HostFiles
from virtshim.neighbours import kubelet as kubelet_files
from virtshim.neighbours import runtimes as runtime_files
from virtshim.preflight import host_facts, kubelet, machine, node_facts, overhead
from virtshim.preflight.api_server import agent_findings, api_server_findings, named_objects, runtime_classes_in
from virtshim.preflight.finding import Finding
from virtshim.preflight.kubelet import root_socket
from virtshim.preflight.runtimes import installed_findings, installed_unused
from virtshim.preflight.virtualization import ProgramOutput
from virtshim.vm.node_profile import systemd_cgroups

# As virtshim-agent.service has it.
AGENT_KUBECONFIG: Final = "/etc/virtshim/agent.kubeconfig"
_CLOCK_SOURCE: Final = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


def kubelet_configuration(_settings: Settings) -> Sequence[Finding]:
    return [kubelet.kubelet_configuration(kubelet_files.read(HostFiles()))]


def kubelet_cgroups(settings: Settings) -> Sequence[Finding]:
    setup = kubelet_files.read(HostFiles())
    if not setup.is_there:
        return []
    differs = setup.cgroup_driver is None or setup.cgroup_driver.value != _driver(settings)
    version = host_facts.program_output(["kubelet", "--version"]) if differs else ProgramOutput()
    return [kubelet.kubelet_cgroup_driver(setup, _driver(settings), version)]


def kubelet_runtime(settings: Settings) -> Sequence[Finding]:
    setup = kubelet_files.read(HostFiles())
    if not setup.is_there:
        return []
    served = {settings.cri_socket: "virtshim", settings.proxy_socket: "virtshim-proxy"}
    missing = frozenset(path for path in served if host_facts.node(path) is None)
    return [kubelet.kubelet_endpoint(setup, served, missing)]


def swap(_settings: Settings) -> Sequence[Finding]:
    return [kubelet.kubelet_swap(kubelet_files.read(HostFiles()), host_facts.text("/proc/swaps"))]


def container_runtimes(settings: Settings, files: HostFiles | None = None) -> Sequence[Finding]:
    files = files or HostFiles()
    if kubelet.kubelet_asks(kubelet_files.read(files), settings.cri_socket):
        return [installed_unused()]
    has_proxy = host_facts.node(f"{settings.proxy_socket}.lock") is not None
    found, conf_dir = runtime_files.read(files), settings.tapmanager.cni_conf_dir
    pod_handlers = sorted(settings.proxy.pod_handlers)
    return installed_findings(found, _driver(settings), conf_dir, behind_proxy=has_proxy, pod_handlers=pod_handlers)


def clock_synchronised(_settings: Settings) -> Sequence[Finding]:
    return [machine.clock_synchronised(*node_facts.synchronised())]


def clock_source(_settings: Settings) -> Sequence[Finding]:
    return [machine.clock_source(host_facts.text(_CLOCK_SOURCE))]


def virtshim(settings: Settings) -> Sequence[Finding]:
    return [_listener("virtshim", settings.cri_socket)]


def shares(settings: Settings) -> Sequence[Finding]:
    return [_listener("virtshim-shares", settings.shares.socket)]


def cluster_objects(settings: Settings) -> Sequence[Finding]:
    """Returns nothing if `kubernetes.kubeconfig` is not set."""
    if not settings.kubernetes.kubeconfig:
        return []
    named = named_objects(node_facts.ready(settings))
    return api_server_findings(settings.kubernetes.kubeconfig, named, *node_facts.unread(settings))


def cluster_agent(_settings: Settings, kubeconfig: str = AGENT_KUBECONFIG) -> Sequence[Finding]:
    """Returns nothing on a node that does not run the agent as a service."""
    if host_facts.node(kubeconfig) is None:
        return []
    asked = ["systemctl", "show", "--property=ActiveState", "--value", "virtshim-agent.service"]
    return agent_findings(kubeconfig, host_facts.program_output(asked), time.time())


def qemu_overhead(settings: Settings) -> Sequence[Finding]:
    measured, trouble = node_facts.qemus(settings)
    written = node_facts.runtime_classes_of(overhead.RUNTIME_CLASS)
    return [
        overhead.running(measured, trouble, *node_facts.unread(settings)),
        *(
            overhead.declared(one, settings.cri.runtime_handlers, measured, settings.proxy.pod_handlers)
            for one in written
        ),
    ]


def of_cluster(kubeconfig: str) -> Callable[[Settings], Sequence[Finding]]:
    """The check of the cluster's RuntimeClasses, using this kubeconfig."""

    def runtime_class(settings: Settings) -> Sequence[Finding]:
        handlers, pod_handlers = settings.cri.runtime_handlers, settings.proxy.pod_handlers
        measured, _ = node_facts.qemus(settings)
        found = runtime_classes_in(kubeconfig, handlers, pod_handlers)
        return [overhead.declared(one, handlers, measured, pod_handlers) for one in found]

    return runtime_class


def _listener(unit: str, path: str) -> Finding:
    return root_socket(unit, path, host_facts.node(path), node_facts.silence(path))


def _driver(settings: Settings) -> str:
    return "systemd" if systemd_cgroups(settings) else "cgroupfs"
