"""In this chapter, virtual functions of a network card that CNI plugins move into pods become the guests' NICs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import card
import hardware
from cluster import WAIT_LIMIT, device_plugin, kill_daemons
from hardware import CARD_RESOURCE
from node import Node
from podclient import wait_until
from telling import Stage

from criproto.runtime_v1 import api_pb2 as pb

MACS = ("52:54:00:0c:00:10", "52:54:00:0c:00:11")
VLAN = 77
MTU = 1400
ADDRESSES = ("10.77.0.10/24", "10.77.0.11/24")
_GATEWAY = "10.77.0.1"

# A plugin for functions that are at vfio-pci already: it moves no link, and its result names the function (CNI 1.1).
_VFIO_PLUGIN = f"""#!/bin/sh
test "$CNI_COMMAND" = ADD || exit 0
cat <<END
{{"cniVersion": "1.1.0",
 "interfaces": [{{"name": "$CNI_IFNAME", "mac": "{MACS[1]}", "sandbox": "$CNI_NETNS", "pciID": "{card.FUNCTIONS[1]}"}}],
 "ips": [{{"address": "{ADDRESSES[1]}", "gateway": "{_GATEWAY}", "interface": 0}}],
 "routes": [{{"dst": "0.0.0.0/0", "gw": "{_GATEWAY}"}}]}}
END
"""


@contextmanager
def network(node: Node, **plugin: Any) -> Iterator[None]:
    """Inside the block, pods get this network. Its DEL works afterwards: tapmanager keeps the configuration."""
    file = Path(node.directory, "cni/net.d/00-card.conflist")
    file.write_text(json.dumps({"cniVersion": plugin.pop("version"), "name": "card", "plugins": [plugin]}))
    yield
    file.unlink()


def host_device(node: Node, number: int) -> Any:
    route = {"dst": "0.0.0.0/0", "gw": _GATEWAY}
    ipam = {"type": "static", "addresses": [{"address": ADDRESSES[0], "gateway": _GATEWAY}], "routes": [route]}
    return network(node, version="1.0.0", type="host-device", pciBusID=card.FUNCTIONS[number], ipam=ipam)


def passed(node: Node) -> list[str]:
    """The host addresses of the devices of the only running QEMU."""
    (pid,) = node.qemu_pids()
    return re.findall(r'"driver":"vfio-pci","host":"([^"]*)"', Path(f"/proc/{pid}/cmdline").read_text())


def network_config(node: Node) -> str:
    """cloud-init's network-config in the newest seed."""
    seed = max(Path(node.directory).glob("**/seed.iso"), key=lambda path: path.stat().st_mtime)
    words = ["isoinfo", "-R", "-i", str(seed), "-x", "/network-config"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def set_bind(node: Node, *, on: bool) -> None:
    """Sets devices.bind for daemons that are started from now on."""
    file = Path(node.directory, "config.toml")
    rest = file.read_text().replace("bind = false\n", "")
    file.write_text(rest if on else rest.replace("[devices]\n", "[devices]\nbind = false\n"))


def tell(stage: Stage) -> None:
    with stage.report.step("nic: card") as facts:
        facts["there"] = card.there()
        if not card.there():
            return
    try:
        with stage.report.step("nic: functions") as facts:
            _make_functions()
            facts["states"] = [card.state(number) for number in range(3)]
        with card.wire() as wire:
            _at_its_kernel_driver(stage, wire)
            if stage.full:
                _at_vfio(stage, wire)
    finally:
        card.remove_functions()


def _make_functions() -> None:
    """Makes one function at its kernel driver with all possible settings of the card, one at VFIO, one untouched."""
    card.make_functions()
    physical, (first, second, _) = card.interface(card.CARD), card.FUNCTIONS
    card.ip("link", "set", physical, "vf", "0", "mac", MACS[0], "vlan", str(VLAN), "spoofchk", "on", "trust", "on")
    card.ip("link", "set", physical, "vf", "1", "mac", MACS[1])
    hardware.bind(second, "vfio-pci")
    # A function's driver asks its card for the MAC when it is bound.
    hardware.bind(first, "vfio-pci")
    hardware.bind(first, "")
    wait_until(lambda: card.interface(first) != "", 60, "the function has its interface again")
    card.ip("link", "set", card.interface(first), "name", "vf0", "mtu", str(MTU))


def _may_choose_its_address(name: str) -> bool:
    """Whether the function may change its MAC: a card refuses that if it assigned one."""
    own = card.link(name)["address"]
    try:
        card.ip("link", "set", name, "address", "52:54:00:0c:00:12")
    except subprocess.CalledProcessError:
        return False
    card.ip("link", "set", name, "address", own)
    return True


def _at_its_kernel_driver(stage: Stage, wire: card.Wire) -> None:
    report, node, client, cluster = stage.report, stage.node, stage.client, stage.cluster
    with report.step("nic: no address set") as facts, host_device(node, 2):
        pod = cluster.sandbox("no-address")
        facts["lent"] = card.state(2)
        pod.remove()
        facts["state"] = card.state(2)
        facts["may choose"] = _may_choose_its_address(card.interface(card.FUNCTIONS[2]))
    with report.step("nic: moved") as facts, host_device(node, 0):
        pod = cluster.sandbox("own-nic")
        facts["ip"] = client.pod_ip(pod.id)
        facts["state"] = card.state(0)
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod.id, verbose=True)
        facts["inspected"] = json.loads(client.runtime.PodSandboxStatus(request, timeout=WAIT_LIMIT).info["info"])
    with report.step("nic: in the guest") as facts:
        wire.frames.clear()
        facts["console"] = pod.run(cluster.container())
        facts["frames"] = list(wire.frames)
        facts["passed"] = passed(node)
    if stage.full:
        with report.step("nic: daemons killed") as facts:
            running = node.qemu_pids()
            set_bind(node, on=False)
            kill_daemons(node, client, "tapmanager", "virtshim")
            facts["same"] = node.qemu_pids() == running
            facts["states"] = [pb.ContainerState.Name(container.state) for container in client.containers()]
            facts["state"] = card.state(0)
    with report.step("nic: removed") as facts:
        before = len(node.log())
        pod.remove()
        facts["log"] = node.log()[before:]
        facts["state"] = card.state(0)
        facts["namespaces"] = os.listdir("/run/netns")


def _at_vfio(stage: Stage, wire: card.Wire) -> None:
    """A function at VFIO, with devices.bind off since the daemons were killed."""
    report, node, client, cluster, kubelet = stage.report, stage.node, stage.client, stage.cluster, stage.kubelet
    plugin = Path("/opt/cni/bin/card-at-vfio")
    plugin.parent.mkdir(parents=True, exist_ok=True)
    plugin.write_text(_VFIO_PLUGIN)
    plugin.chmod(0o755)
    with report.step("nic: not bound") as facts:
        pod = cluster.sandbox("not-bound")
        stage.books.grant("default", "not-bound", "vm", ("example.com/kernel-vf", [card.FUNCTIONS[2]]))
        facts.update(pod.refusal(cluster.container(envs={"PCIDEVICE_EXAMPLE_COM_KERNEL_VF": card.FUNCTIONS[2]})))
        facts["state"] = card.state(2)
        pod.remove()
    with report.step("nic: named, and granted too") as facts, network(node, version="1.1.0", type=plugin.name):
        pod = cluster.sandbox("vfio-nic")
        facts["ip"] = client.pod_ip(pod.id)
        with device_plugin(kubelet, "nodes", {CARD_RESOURCE: f'addresses = ["{card.FUNCTIONS[1]}"]'}):
            config = cluster.container(kubelet.plugins[CARD_RESOURCE].allocate(card.FUNCTIONS[1]))
        stage.books.grant("default", "vfio-nic", "vm", (CARD_RESOURCE, [card.FUNCTIONS[1]]))
        facts["devices"] = [device.host_path for device in config.devices]
        wire.frames.clear()
        facts["console"] = pod.run(config)
        facts["frames"] = list(wire.frames)
        facts["passed"] = passed(node)
        facts["network config"] = network_config(node)
    with report.step("nic: both gone") as facts:
        pod.remove()
        wait_until(lambda: not hardware.vfio_users(), WAIT_LIMIT, "nobody has a VFIO group open")
        facts["state"] = card.state(1)
        set_bind(node, on=True)
        kill_daemons(node, client, "virtshim")
        facts["states"] = [card.state(number) for number in range(3)]
