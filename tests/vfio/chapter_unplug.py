"""In this chapter, VMs are killed and devices fail."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import hardware
from cluster import WAIT_LIMIT, Cluster, Sandbox, device_plugin, kill_daemons
from hardware import EDU_RESOURCE, NVME_RESOURCE
from node import VIRTSHIM
from podclient import log_lines, wait_until
from telling import Stage

from criproto.runtime_v1 import api_pb2 as pb

# devices.unplug of the node.
SECONDS = 15.0

_FAULTY = "example.com/faulty"
_RESOURCES = {
    EDU_RESOURCE: f'addresses = ["{hardware.EDU}"]',
    NVME_RESOURCE: f'pfs = ["{hardware.NVME}"]',
    _FAULTY: 'vendor = "8086"\ndevices = ["10d3"]',
}
# Bits of the AER capability's register of uncorrectable errors (PCI Express base specification).
_COMPLETION_TIMEOUT, _MALFORMED = 1 << 14, 1 << 18
_METHOD = Path("/sys/bus/pci/devices") / hardware.VFS[0] / "reset_method"


def tell(stage: Stage) -> None:
    with ExitStack() as stack:
        stack.enter_context(device_plugin(stage.kubelet, "nodes", _RESOURCES))
        _let_go(stage)
        _health(stage)
        if stage.full:
            _errors(stage)
            _killed(stage)


def ended(stage: Stage, container: str) -> dict[str, Any]:
    """The facts about an ended container."""
    status = stage.client.status(container)
    wait_until(lambda: not hardware.vfio_users(), WAIT_LIMIT, "nobody has a VFIO group open")
    # The newest line about it.
    told = [line for line in stage.node.log().splitlines() if "vm.unplugged" in line and container[:20] in line]
    return {
        "state": pb.ContainerState.Name(status.state),
        "code": status.exit_code,
        "message": status.message,
        "console": log_lines(status.log_path),
        "unplugged": told,
        "qemus": len(stage.node.qemu_pids()),
        "drivers": hardware.drivers(),
    }


def stopped(stage: Stage, container: str, grace: int) -> dict[str, Any]:
    begun = time.monotonic()
    stage.client.stop(container, grace)
    return {"took": time.monotonic() - begun, **ended(stage, container)}


def granted(stage: Stage, cluster: Cluster) -> pb.ContainerConfig:
    """Creates a container with edu and an NVMe VF."""
    edu, vf = (stage.kubelet.plugins[resource] for resource in (EDU_RESOURCE, NVME_RESOURCE))
    return cluster.container(edu.allocate(hardware.EDU), vf.allocate(hardware.VFS[0]))


def deaf(stage: Stage) -> Cluster:
    """An image whose guests do not release devices on request."""
    return stage.cluster.with_guest("devices.qcow2")


def _again(config: pb.ContainerConfig) -> None:
    """Starts the next attempt with its own log, as kubelet does."""
    config.metadata.attempt += 1
    config.log_path = f"{config.metadata.name}/{config.metadata.attempt}.log"


def _let_go(stage: Stage) -> None:
    with stage.report.step("unplug answered") as facts:
        pod = stage.cluster.sandbox("unplugs")
        facts.update(stopped(stage, pod.started(granted(stage, stage.cluster)), 1))
    if stage.full:
        _kept(stage, pod)
    else:
        pod.remove()


def _kept(stage: Stage, pod: Sandbox) -> None:
    report = stage.report
    with report.step("unplug ignored") as facts:
        config = granted(stage, deaf(stage))
        _again(config)
        facts.update(stopped(stage, pod.started(config), 0))
    with report.step("unplug: pod removed") as facts:
        _again(config)
        pod.started(config)
        begun = time.monotonic()
        pod.remove()
        facts["took"] = time.monotonic() - begun
        wait_until(lambda: not hardware.vfio_users(), WAIT_LIMIT, "nobody has a VFIO group open")
        facts["drivers"] = hardware.drivers()


def _killed(stage: Stage) -> None:
    report, client = stage.report, stage.client
    with report.step("killed while it waits for the guest") as facts:
        pod = stage.cluster.sandbox("killed")
        container = pod.started(granted(stage, deaf(stage)))
        asked = stage.node.log().count("vm.unplug.asked")
        stopping = threading.Thread(target=_stop, args=(stage, container), daemon=True)
        stopping.start()
        # Logged once it is recorded: before that only kubelet knows that the VM shall end.
        wait_until(lambda: stage.node.log().count("vm.unplug.asked") > asked, WAIT_LIMIT, "the end is written down")
        kill_daemons(stage.node, client, "virtshim")
        stopping.join(WAIT_LIMIT)
        wait_until(
            lambda: client.status(container).state == pb.CONTAINER_EXITED,
            WAIT_LIMIT,
            "it ends though nobody asks again",
        )
        facts.update(ended(stage, container))
        pod.remove()


def _stop(stage: Stage, container: str) -> None:
    with suppress(grpc.RpcError):  # the daemon is killed meanwhile
        stage.client.stop(container, 0)


def _health(stage: Stage) -> None:
    report = stage.report
    first = hardware.VFS[0]
    vf = stage.kubelet.plugins[NVME_RESOURCE]
    with report.step("reset") as facts:
        pod = stage.cluster.sandbox("resets")
        config = stage.cluster.container(vf.allocate(first))
        facts.update(stopped(stage, pod.started(config), 0), metrics=_metrics(stage, pod))
    if stage.full:
        _reset_fails(stage, pod, config)
    pod.remove()


def _reset_fails(stage: Stage, pod: Sandbox, config: pb.ContainerConfig) -> None:
    report = stage.report
    first = hardware.VFS[0]
    vf = stage.kubelet.plugins[NVME_RESOURCE]
    with report.step("reset fails") as facts:
        _again(config)
        container = pod.started(config)
        methods = _METHOD.read_text()
        _METHOD.write_text("\n")  # the kernel refuses to reset it from now on
        facts.update(stopped(stage, container, 0), methods=methods, metrics=_metrics(stage, pod))
        wait_until(lambda: vf.lists[-1][first] == "Unhealthy", WAIT_LIMIT, "kubelet sees the device unhealthy")
        facts["others"] = vf.lists[-1]
        facts["check"] = _check()
    with report.step("broken device refused") as facts:
        _again(config)
        facts.update(pod.refusal(config))
    with report.step("healed") as facts:
        _METHOD.write_text("default")
        facts.update(stopped(stage, pod.started(config), 0), metrics=_metrics(stage, pod))
        wait_until(lambda: vf.lists[-1][first] == "Healthy", WAIT_LIMIT, "kubelet sees the device healthy")
        facts["check"] = _check()


def _errors(stage: Stage) -> None:
    """Injects PCI Express errors (AER) through the kernel."""
    report, client = stage.report, stage.client
    address, plugin = hardware.faulty(), stage.kubelet.plugins[_FAULTY]
    with report.step("errors: before") as facts:
        facts["address"] = address
        loaded = subprocess.run(["modprobe", "aer_inject"], capture_output=True, text=True, check=False)
        facts["missing"] = loaded.stderr
        facts["offered"] = plugin.lists[-1]
    if loaded.returncode:
        return
    with report.step("errors: nonfatal") as facts:
        pod = stage.cluster.sandbox("errors")
        container = pod.started(stage.cluster.container(plugin.allocate(address)))
        _inject_until_told(stage, address, _COMPLETION_TIMEOUT)
        facts.update(metrics=_metrics(stage, pod), offered=plugin.lists[-1], message=client.status(container).message)
    with report.step("errors: fatal") as facts:
        hardware.inject(address, _MALFORMED)  # one: virtshim has read the counters before it
        wait_until(lambda: plugin.lists[-1][address] == "Unhealthy", WAIT_LIMIT, "kubelet sees it unhealthy")
        wait_until(lambda: "fatal" in client.status(container).message, WAIT_LIMIT, "the container's message tells")
        status = client.status(container)
        facts.update(metrics=_metrics(stage, pod), message=status.message, state=pb.ContainerState.Name(status.state))
        facts["log"] = [line for line in stage.node.log().splitlines() if "device.errors" in line]
    with report.step("errors: reset") as facts:
        facts.update(stopped(stage, container, 0), metrics=_metrics(stage, pod))
        wait_until(lambda: plugin.lists[-1][address] == "Healthy", WAIT_LIMIT, "kubelet sees it healthy")
        pod.remove()


def _inject_until_told(stage: Stage, address: str, error: int) -> None:
    """Injects until virtshim reports it: errors before its first reading of the counters do not count."""
    injected = 0.0

    def told() -> bool:
        nonlocal injected
        if time.monotonic() - injected > 5:
            hardware.inject(address, error)
            injected = time.monotonic()
        return "device.errors" in stage.node.log()

    wait_until(told, WAIT_LIMIT, "new errors are told")


def _check() -> str:
    """The findings of `virtshim check --devices` about the first VF."""
    command = [*VIRTSHIM, "check", "--devices", "--json", "--config", "/run/device-plugin.toml"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    (row,) = [row for row in told["devices"] if row["ADDRESS"] == hardware.VFS[0]]
    return str(row["FOR A VM"])


def _metrics(stage: Stage, pod: Sandbox) -> dict[str, int]:
    """The metrics of the pod's devices: name and own labels -> value."""
    (found,) = [
        one
        for one in stage.client.runtime.ListPodSandboxMetrics(pb.ListPodSandboxMetricsRequest()).pod_metrics
        if one.pod_sandbox_id == pod.id
    ]
    return {
        " ".join((metric.name, *metric.label_values[6:])): metric.value.value
        for metric in (*found.metrics, *(one for vm in found.container_metrics for one in vm.metrics))
        if metric.name.startswith("virtshim_device_")
    }
