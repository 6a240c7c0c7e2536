"""Pods on a node's network, VMs and containers, and the traces that they leave on the node. Namespaces stand for the
VMs' guests."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_guest import KernelGuest
from packets import Place, rule
from tap_node import PLUGINS, TapNode, sandbox

from tapmanager.cni.conf import CniAttachment
from tapmanager.cni.plugins import CniPlugins
from tapmanager.links import netns
from tapmanager.pod import Pod
from virtshim.model.ids import SandboxId
from virtshim.model.network import Dns, PodNetwork
from virtshim.model.sandbox import PodKey
from virtshim.pods.networks import PodNetworkClient
from virtshim.pods.ports import AttachRequest
from virtshim.pods.tapmanager_connection import TapmanagerConnection
from virtshim.seed.network_config import network_config

# The node's own, behind no pod's link.
HOST = Place("the host", "", {"0/4": "10.91.255.1", "0/6": "fd00:91:255::1"})
_SECONDS = 60.0


@dataclass(frozen=True)
class Vm:
    place: Place
    sandbox: str
    network: PodNetwork

    @property
    def host_link(self) -> str:
        """The node's end of the pod's first link."""
        inside = _said("ip", "-n", Path(self.network.netns).name, "-j", "link", "show", self.network.interfaces[0].name)
        index = json.loads(inside)[0]["link_index"]
        return next(one["ifname"] for one in json.loads(_said("ip", "-j", "link")) if one["ifindex"] == index)


@contextlib.contextmanager
def forwarding_host() -> Iterator[None]:
    """A host configured like a cluster node: it forwards, tracks connections, and filters bridged packets if the kernel
    can."""
    wanted = {
        "net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1",
        "net/bridge/bridge-nf-call-iptables": "1", "net/bridge/bridge-nf-call-ip6tables": "1",
    }  # fmt: skip
    files = {Path("/proc/sys", name): value for name, value in wanted.items() if Path("/proc/sys", name).exists()}
    before = {file: file.read_text() for file in files}
    ends = [f"{address}/{128 if ':' in address else 32}" for address in HOST.addresses.values()]
    try:
        for file, value in files.items():
            file.write_text(value)
        for end in ends:
            subprocess.run(["ip", "address", "add", end, "dev", "lo"], check=True)
        with rule("ct state established accept", "inet forward", "vst-track"):
            yield
    finally:
        for end in ends:
            subprocess.run(["ip", "address", "del", end, "dev", "lo"], check=False)
        for file, value in before.items():
            file.write_text(value)


@contextlib.contextmanager
def vm(node: TapNode, name: str, *, by_dhcp: bool = False, **asked: object) -> Iterator[Vm]:
    """A VM; IPv4 `by_dhcp`, otherwise by the document for cloud-init like the rest. `asked`: more fields of its
    AttachRequest."""
    which, client = sandbox(), PodNetworkClient(TapmanagerConnection(node.socket))
    pod = PodKey("default", name.lower().replace(" ", "-"), "uid-1", 0)
    network = client.attach(AttachRequest(SandboxId(which), pod, Dns(("10.96.0.10",)), **asked), _SECONDS)
    try:
        with KernelGuest(*node.fetch(which, network.fetch_key)) as guest:
            document = network_config(network.interfaces, network.dns)
            assert document is not None
            guest.configure(document, (6,) if by_dhcp else (4, 6))
            addresses = {}
            for at, nic in enumerate(network.interfaces):
                if by_dhcp and any(":" not in one for one in nic.addresses):
                    guest.ask_by_dhcp(at)
                addresses |= {f"{at}/{6 if ':' in one else 4}": one.partition("/")[0] for one in nic.addresses}
            yield Vm(Place(name, guest.path, addresses, network.interfaces[0].mtu), which, network)
    finally:
        client.release(SandboxId(which), _SECONDS)


@contextlib.contextmanager
def plain_container(node: TapNode) -> Iterator[Place]:
    """A namespace with the same network, as a container runtime would create it."""
    which = sandbox()
    path = f"/run/netns/vst-plain-{which[:8]}"
    bin_dirs = (str(node.bin_dir), PLUGINS)
    cni = CniPlugins(str(node.conf_dir), bin_dirs, _SECONDS)
    conf, at = cni.load(), CniAttachment(Pod(which, "default", "plain", "uid-2"), path, bin_dirs)
    netns.create(path)
    try:
        result = cni.add(conf, at, time.monotonic() + _SECONDS)
        try:
            ips = [str(ip["address"]) for ip in result["ips"]]
            yield Place("a container", path, {f"0/{6 if ':' in ip else 4}": ip.partition("/")[0] for ip in ips})
        finally:
            cni.delete(conf, at, result, time.monotonic() + _SECONDS)
    finally:
        netns.delete(path)


def marks(vms: Iterable[Vm]) -> set[str]:
    """Words that would appear in any leftovers."""
    found = {address for one in vms for address in one.place.addresses.values()}
    return found | {word for one in vms for word in (one.sandbox[:12], one.host_link)}


def told_of(node: TapNode, words: set[str]) -> list[str]:
    """Everything in the node's kernel and plugins that mentions one of these words."""
    commands = (
        ("ip", "-o", "link"), ("ip", "-o", "address"), ("ip", "route", "show", "table", "all"),
        ("ip", "-6", "route", "show", "table", "all"), ("ip", "rule"), ("ip", "netns"), ("tc", "qdisc"),
        ("iptables-save",), ("ip6tables-save",), ("nft", "list", "ruleset"),
    )  # fmt: skip
    lines = "\n".join(_said(*command) for command in commands).splitlines()
    lines += [str(path) for folder in (node.leases, node.ledger, node.folder / "multus") for path in folder.rglob("*")]
    return [
        line for line in lines if words & set(line.replace("/", " ").replace("@", " ").split()) or _is_in(line, words)
    ]


def _is_in(line: str, words: set[str]) -> bool:
    """Whether a word occurs; a sandbox's id is part of many names."""
    return any(len(word) == 12 and word in line for word in words)


def _said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
