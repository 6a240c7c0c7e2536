"""The checks of what a node has beside virtshim: kubelet, a container runtime, its clock, who listens, what QEMU takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from virtshim.config import Settings
from virtshim.devices.host_files import HostFiles
from virtshim.hypervisor.node_profile import systemd_cgroups
from virtshim.neighbours import kubelet as kubelet_files
from virtshim.neighbours import runtimes as runtime_files
from virtshim.preflight import host_facts
from virtshim.preflight.finding import Finding
from virtshim.preflight.node import api_server, beside, clock, cluster, facts, kubelet, listeners, overhead
from virtshim.preflight.virtualization import ProgramOutput

RUNTIME_CLASS: Final = "/etc/virtshim/runtimeclass.yaml"
_CLOCK_SOURCE: Final = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


def kubelet_configuration(_settings: Settings) -> Sequence[Finding]:
    return [kubelet.configuration(kubelet_files.read(HostFiles()))]


def kubelet_cgroups(settings: Settings) -> Sequence[Finding]:
    setup = kubelet_files.read(HostFiles())
    if not setup.is_there:
        return []
    differs = setup.cgroup_driver is None or setup.cgroup_driver.value != _driver(settings)
    version = host_facts.program_output(["kubelet", "--version"]) if differs else ProgramOutput()
    return [kubelet.cgroup_driver(setup, _driver(settings), version)]


def kubelet_runtime(settings: Settings) -> Sequence[Finding]:
    setup = kubelet_files.read(HostFiles())
    if not setup.is_there:
        return []
    served = {settings.cri_socket: "virtshim", settings.proxy_socket: "virtshim-proxy"}
    missing = frozenset(path for path in served if host_facts.node(path) is None)
    return [kubelet.endpoint(setup, served, missing)]


def swap(_settings: Settings) -> Sequence[Finding]:
    return [kubelet.swap(kubelet_files.read(HostFiles()), host_facts.text("/proc/swaps"))]


def container_runtimes(settings: Settings, files: HostFiles | None = None) -> Sequence[Finding]:
    files = files or HostFiles()
    if kubelet.asks(kubelet_files.read(files), settings.cri_socket):
        return [beside.unused()]
    has_proxy = host_facts.node(f"{settings.proxy_socket}.lock") is not None
    found, conf_dir = runtime_files.read(files), settings.tapmanager.cni_conf_dir
    return beside.findings(found, _driver(settings), conf_dir, behind_proxy=has_proxy)


def clock_synchronised(_settings: Settings) -> Sequence[Finding]:
    return [clock.synchronised(*facts.synchronised())]


def clock_source(_settings: Settings) -> Sequence[Finding]:
    return [clock.source(host_facts.text(_CLOCK_SOURCE))]


def virtshim(settings: Settings) -> Sequence[Finding]:
    return [_listener("virtshim", settings.cri_socket)]


def shares(settings: Settings) -> Sequence[Finding]:
    return [_listener("virtshim-shares", settings.shares.socket)]


def cluster_objects(settings: Settings) -> Sequence[Finding]:
    """Nothing where no API server is to be asked."""
    if not settings.kubernetes.kubeconfig:
        return []
    named = api_server.named(facts.ready(settings))
    return api_server.findings(settings.kubernetes.kubeconfig, named, *facts.unread(settings))


def qemu_overhead(settings: Settings) -> Sequence[Finding]:
    measured, trouble = facts.qemus(settings)
    written = facts.runtime_classes_of(RUNTIME_CLASS)
    return [
        overhead.running(measured, trouble, *facts.unread(settings)),
        *(overhead.declared(one, settings.cri.runtime_handlers, measured) for one in written),
    ]


def of_cluster(kubeconfig: str) -> Callable[[Settings], Sequence[Finding]]:
    """The check of the cluster's RuntimeClasses, with the rights of this kubeconfig."""

    def runtime_class(settings: Settings) -> Sequence[Finding]:
        handlers = settings.cri.runtime_handlers
        measured, _ = facts.qemus(settings)
        return [overhead.declared(one, handlers, measured) for one in cluster.runtime_classes(kubeconfig, handlers)]

    return runtime_class


def _listener(unit: str, path: str) -> Finding:
    return listeners.listener(unit, path, host_facts.node(path), facts.silence(path))


def _driver(settings: Settings) -> str:
    return "systemd" if systemd_cgroups(settings) else "cgroupfs"
