"""In this chapter, VMs get devices of our own device plugin. It runs last, because it ends with a running VM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hardware
from cluster import WAIT_LIMIT, Sandbox, device_plugin, kill_daemons
from fakes.kubelet import Plugin
from hardware import EDU_RESOURCE, NVME_RESOURCE, SHARED_RESOURCE
from node import Node
from podclient import wait_until
from telling import Stage

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.devices.driver_client import DeviceDriverClient
from virtshim.devices.values import PciAddress
from virtshim.model.errors import ShimError
from virtshim.pods.tapmanager_connection import TapmanagerConnection

_RESOURCES = {
    EDU_RESOURCE: f'addresses = ["{hardware.EDU}"]',
    NVME_RESOURCE: f'pfs = ["{hardware.NVME}"]',
    SHARED_RESOURCE: f'addresses = ["{hardware.SHARED_EDU}"]',
}


def of_qemu(node: Node) -> dict[str, Any]:
    """Facts about the only running QEMU."""
    (pid,) = node.qemu_pids()
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (locked,) = [line.split()[3] for line in limits if line.startswith("Max locked memory")]
    return {"uid": os.stat(f"/proc/{pid}").st_uid, "memlock": locked, "vfio_users": hardware.vfio_users()}


def words_of_qemu(node: Node) -> list[str]:
    (pid,) = node.qemu_pids()
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def offered(plugins: Mapping[str, Plugin]) -> dict[str, dict[str, str]]:
    return {resource: plugin.lists[-1] for resource, plugin in plugins.items()}


def client_of_drivers(node: Node) -> DeviceDriverClient:
    return DeviceDriverClient(TapmanagerConnection(f"{node.directory}/run/tapmanager.sock"))


def tell(stage: Stage) -> None:
    report, node, client, cluster = stage.report, stage.node, stage.client, stage.cluster
    kubelet, books = stage.kubelet, stage.books
    first, second, third = hardware.VFS
    with ExitStack() as plugin:
        with report.step("plugin") as facts:
            log = plugin.enter_context(device_plugin(kubelet, "nodes", _RESOURCES))
            facts["offered"] = offered(kubelet.plugins)
            facts["log"] = log.read_text()
        edu = kubelet.plugins[EDU_RESOURCE].allocate(hardware.EDU)
        vf, other_vf = (kubelet.plugins[NVME_RESOURCE].allocate(address) for address in (first, second))

    # The answer of a plugin for functions with kernel drivers: only a variable and kubelet's list, but no node.
    lent = {"PCIDEVICE_EXAMPLE_COM_KERNEL_VF": third}
    in_books = ("example.com/kernel-vf", [third])
    with report.step("granted") as facts:
        facts["envs"] = {key: value for answer in (edu, vf) for key, value in answer.envs.items()}
        books.grant("default", "one", "vm", (EDU_RESOURCE, [hardware.EDU]), (NVME_RESOURCE, [first]), in_books)
        config = cluster.container(edu, vf, envs=lent)
        facts["devices"] = [device.host_path for device in config.devices]
    with report.step("passthrough") as facts:
        pod = cluster.sandbox("one")
        volume = hardware.make_block_device()
        config.devices.add(container_path="/dev/volume", host_path=volume, permissions="rw")
        directory = Path(node.directory, "data")
        directory.mkdir()
        config.mounts.add(container_path="/data", host_path=str(directory))
        facts["console"] = pod.run(config)
        facts["words"] = words_of_qemu(node)
        facts["drivers"] = hardware.drivers()
        facts.update(of_qemu(node))

    with report.step("asked for back") as facts:
        try:
            client_of_drivers(node).bind(PciAddress.parse(third), "nvme", WAIT_LIMIT)
        except ShimError as exc:
            facts["refusal"] = str(exc)
        facts["drivers"] = hardware.drivers()

    if stage.full:
        with report.step("daemon killed") as facts:
            (running,) = node.qemu_pids()
            kill_daemons(node, client, "virtshim")
            facts["drivers"] = hardware.drivers()
            facts["same"] = node.qemu_pids() == {running}
            facts["states"] = [pb.ContainerState.Name(container.state) for container in client.containers()]
    with report.step("second pod"):
        other = cluster.sandbox("other")
    with report.step("claimed twice") as facts:
        facts.update(other.refusal(cluster.container(vf)))
    with report.step("forged hint") as facts:
        facts.update(other.refusal(cluster.container(envs={"PCIDEVICE_EXAMPLE_COM_NVME_VF": second})))
    with report.step("forged beside a grant") as facts:
        config = cluster.container(other_vf, envs={"PCIDEVICE_OTHER": hardware.SHARED_EDU})
        facts.update(other.refusal(config))
    with report.step("group not viable") as facts:
        nodes = ("/dev/vfio/vfio", f"/dev/vfio/{hardware.group(hardware.SHARED_EDU)}")
        hint = {"PCIDEVICE_EXAMPLE_COM_SHARED": hardware.SHARED_EDU}
        facts.update(other.refusal(cluster.container(devices=nodes, envs=hint)))
        facts["driver"] = hardware.driver(hardware.SHARED_RNG)

    with report.step("removed") as facts:
        pod.remove()
        hardware.remove_block_device(volume)
        wait_until(lambda: not hardware.vfio_users(), WAIT_LIMIT, "nobody has a VFIO group open")
        facts["drivers"] = hardware.drivers()
        facts["qemus"] = len(node.qemu_pids())
    config = cluster.container(vf, envs=lent)
    if stage.full:
        with report.step("not bound") as facts:
            nodes = ("/dev/vfio/vfio", f"/dev/vfio/{hardware.group(third)}")
            facts.update(other.refusal(cluster.container(devices=nodes)))
        with report.step("granted by CDI") as facts, device_plugin(kubelet, "cdi", _RESOURCES):
            config = cluster.container(kubelet.plugins[NVME_RESOURCE].allocate(first), envs=lent)
            facts["cdi"] = [device.name for device in config.CDI_devices]
            facts["devices"] = [device.host_path for device in config.devices]
    with report.step("given again") as facts:
        books.grant("default", "other", "vm", (NVME_RESOURCE, [first]), in_books)
        facts["console"] = other.run(config)
    if stage.full:
        _killed(stage, other, config)


def _killed(stage: Stage, other: Sandbox, config: pb.ContainerConfig) -> None:
    report, node, client = stage.report, stage.node, stage.client
    with report.step("killed") as facts:
        dead = other.kill(node)
        wait_until(lambda: not hardware.vfio_users(), WAIT_LIMIT, "nobody has a VFIO group open")
        status = client.status(dead)
        facts.update(state=pb.ContainerState.Name(status.state), reason=status.reason)
    with report.step("restarted by kubelet") as facts:
        config.metadata.attempt += 1
        facts["console"] = other.run(config)
        client.remove(dead)
        facts["drivers"] = hardware.drivers()
        facts.update(of_qemu(node))
