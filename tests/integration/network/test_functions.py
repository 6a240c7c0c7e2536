"""A network card's function gets into a VM and back, with real namespaces, links and CNI plugins. The card is a fake:
on unbind its link vanishes from the pod, on bind a new one appears on the host. tests/vfio shows what a card's driver
itself does with a MAC, a VLAN or a reset."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from fakes import meta_plugin
from fakes.pcibus import FakePciBus
from tap_node import PLUGINS, TapNode, sandbox

from tapmanager.attachments import Attachments, AttachmentSettings
from tapmanager.cni.plugins import CniPlugins
from tapmanager.dhcp.server import DhcpServer
from tapmanager.drivers import PciDrivers
from tapmanager.errors import TapmanagerError
from tapmanager.ledger import Ledger
from tapmanager.links import netns, pod_links
from tapmanager.links.nic_plan import KernelLink
from tapmanager.pod import NicFunction, Pod, Route
from tapmanager.sriov.host_links import NetlinkHostLinks
from tapmanager.sriov.nic_functions import NicFunctions
from tapmanager.sriov.physical_function import PhysicalFunctions
from tapmanager.sriov.vf_settings import VfSettings

pytestmark = pytest.mark.network

PF, VF = "0000:3b:00.0", "0000:3b:02.0"
ON_HOST = "vstfn0"
SET = VfSettings("00:00:00:00:00:00", 100, 3, "802.1ad", 0, 1000, True, "enable", False, True)
UNTIL = 1e9  # a day that does not come


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


class Links(NetlinkHostLinks):
    """Real links, except where a card with VFs is needed."""

    def __init__(self) -> None:
        self.settings = SET

    def vf_settings(self, physical: str, number: int) -> VfSettings | None:
        return self.settings

    def set_vf(self, physical: str, number: int, change: VfSettings) -> None:
        self.settings = dataclasses.replace(self.settings, **change.to_json())  # type: ignore[arg-type]  # by name


class Card(FakePciBus):
    """A card: its function's link is the plugin's eth0; its own interface is `physical`. A function that loses its
    driver loses VLAN and trust."""

    def __init__(self, root: Path, physical: str, links: Links) -> None:
        super().__init__(root)
        self.pod, self.links = "", links
        self.add_driver("vfio-pci")
        (self.add(PF, "ice") / "net" / physical).mkdir(parents=True)
        self.add_virtual(PF, 0, VF, "iavf")

    def _detach(self, address: str) -> None:
        if self.driver(address) == "iavf" and self.pod:
            ip("-n", self.pod, "link", "del", "eth0")
            self.links.settings = dataclasses.replace(self.links.settings, vlan=0, trust=False)
        super()._detach(address)

    def _attach(self, address: str, driver: str) -> None:
        super()._attach(address, driver)
        if driver == "iavf" and self.pod:
            ip("link", "add", ON_HOST, "type", "veth", "peer", "name", f"{ON_HOST}p")
            (self.bus / "devices" / VF / "net" / ON_HOST).mkdir(parents=True)


class Functions(NicFunctions):
    def virtual_functions(self, links: Sequence[KernelLink]) -> Mapping[str, str]:
        return {"eth0": VF}


class Node:
    def __init__(self, node: TapNode, tmp_path: Path, kind: type[NicFunctions] = Functions) -> None:
        self.node = node
        self.links = Links()
        self.card = Card(tmp_path / "sys", "lo", self.links)
        self.dhcp = DhcpServer()
        ledger = Ledger(str(node.ledger), str(node.placement("").parent))
        ledger.prepare()
        drivers = PciDrivers(str(self.card.root), self.card.write)
        self.attachments = Attachments(
            ledger,
            CniPlugins(str(node.conf_dir), (str(node.bin_dir), PLUGINS), 60.0),
            self.dhcp,
            AttachmentSettings(str(node.netns_dir), (str(node.bin_dir), PLUGINS), os.geteuid(), 30.0),
            kind(drivers, self.links, PhysicalFunctions(self.links, str(self.card.root)), str(self.card.root)),
        )

    def pod(self) -> Pod:
        pod = Pod(sandbox(), "default", "web-0", "uid-1")
        self.card.pod = self.node.netns_of(pod.sandbox).name
        return pod


@pytest.fixture
def card_node(quiet_node: TapNode, tmp_path: Path) -> Iterator[Node]:
    netns.prepare_dir(str(quiet_node.netns_dir))
    made = Node(quiet_node, tmp_path)
    made.dhcp.start()
    yield made
    made.dhcp.stop()


def test_a_function_is_bound_to_vfio_while_attached_and_the_plugin_gets_its_link_back(card_node: Node) -> None:
    # Chained behind the plugin that made the link: at DEL it runs first.
    card_node.node.plugin(
        "looking",
        f"test $CNI_COMMAND = DEL && ip -n $(basename $CNI_NETNS) -o link show eth0 > {card_node.node.folder}/at-del\n"
        "test $CNI_COMMAND = DEL && exit 0\n"
        "python3 -c 'import json,sys; print(json.dumps(json.load(sys.stdin)[\"prevResult\"]))'\n",
    )
    card_node.node.configure(card_node.node.bridge_plugin(), {"type": "looking"})
    pod = card_node.pod()
    entry = card_node.attachments.attach(pod, UNTIL)
    (function,) = entry.functions
    assert entry.nics == ()
    assert (function.pci, function.driver, function.addresses[0].split("/")[0]) == (VF, "iavf", entry.ips[0])
    assert card_node.card.driver(VF) == "vfio-pci"
    assert card_node.links.settings == dataclasses.replace(SET, mac=function.mac)
    assert "eth0" not in card_node.node.inside(pod.sandbox, "ip", "-o", "link")
    card_node.attachments.release(pod.sandbox, UNTIL)
    assert card_node.card.driver(VF) == "iavf"
    assert card_node.links.settings == SET
    assert function.mac in (card_node.node.folder / "at-del").read_text()
    assert card_node.node.leftovers() == []


def test_a_returned_function_may_go_to_another_pod_while_del_fails(card_node: Node) -> None:
    works = card_node.node.folder / "del-works"
    card_node.node.plugin(
        "stubborn",
        f"test $CNI_COMMAND = DEL && test -e {works} && exit 0\n"
        "test $CNI_COMMAND = DEL && exit 1\n"
        "python3 -c 'import json,sys; print(json.dumps(json.load(sys.stdin)[\"prevResult\"]))'\n",
    )
    card_node.node.configure(card_node.node.bridge_plugin(), {"type": "stubborn"})
    pod = card_node.pod()
    card_node.attachments.attach(pod, UNTIL)
    with pytest.raises(TapmanagerError, match="stubborn"):
        card_node.attachments.release(pod.sandbox, UNTIL)
    assert card_node.links.settings == SET
    card_node.links.settings = dataclasses.replace(SET, vlan=200, mac="02:00:00:00:00:01")
    card_node.card.written.clear()
    works.touch()
    card_node.attachments.release(pod.sandbox, UNTIL)
    assert (card_node.links.settings.vlan, card_node.links.settings.mac) == (200, "02:00:00:00:00:01")
    assert card_node.card.written == []
    assert card_node.node.leftovers() == []


def test_an_attach_that_fails_at_the_card_restores_everything(card_node: Node) -> None:
    card_node.card.broken.add("vfio-pci")
    pod = card_node.pod()
    with pytest.raises(TapmanagerError, match="instead of vfio-pci"):
        card_node.attachments.attach(pod, UNTIL)
    assert card_node.card.driver(VF) == "iavf"
    assert card_node.attachments.sandboxes() == []
    assert card_node.node.leftovers() == []


def test_a_pod_without_its_namespace_returns_its_function(card_node: Node) -> None:
    pod = card_node.pod()
    card_node.attachments.attach(pod, UNTIL)
    netns.delete(str(card_node.node.netns_of(pod.sandbox)))
    card_node.attachments.release(pod.sandbox, UNTIL)
    assert card_node.card.driver(VF) == "iavf"
    assert card_node.attachments.sandboxes() == []
    assert card_node.node.leftovers() == []


# A plugin like sriov-cni for a function at VFIO: it returns addresses and no link, and its DEL looks for a link.
SRIOV = """
test $CNI_COMMAND = DEL && { echo '{"code": 999, "msg": "no link '$CNI_IFNAME'"}'; exit 1; }
echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "'$CNI_IFNAME'", "sandbox": "'$CNI_NETNS'"}],
  "ips": [{"address": "10.91.0.7/24", "gateway": "10.91.0.1", "interface": 0}], "routes": [{"dst": "10.91.0.0/16"}]}'
"""


def test_a_vfio_network_works_as_second_network(quiet_node: TapNode, tmp_path: Path) -> None:
    netns.prepare_dir(str(quiet_node.netns_dir))
    made = Node(quiet_node, tmp_path, NicFunctions)
    PciDrivers(str(made.card.root), made.card.write).bind(VF, "vfio-pci")
    quiet_node.plugin("meta", f"exec {sys.executable} {meta_plugin.__file__}\n")
    quiet_node.plugin("sriov", SRIOV)
    first = {"name": quiet_node.network, **quiet_node.bridge_plugin()}
    fast = {"name": "fast", "type": "sriov", "deviceID": VF}
    quiet_node.configure({"type": "meta", "cniDir": str(tmp_path / "multus"), "delegates": [first, fast]})
    made.dhcp.start()
    pod = made.pod()
    entry = made.attachments.attach(pod, UNTIL)
    ((nic,), (function,)) = entry.nics, entry.functions
    assert nic.link == "eth0"
    assert (function.link, function.pci, function.driver) == ("net1", VF, "")
    assert (function.addresses, function.routes) == (("10.91.0.7/24",), (Route("10.91.0.0/16", "10.91.0.1"),))
    assert made.links.settings.mac == function.mac, "nobody had set one"
    made.attachments.release(pod.sandbox, UNTIL)
    assert made.links.settings == SET
    assert made.card.driver(VF) == "vfio-pci"
    assert made.attachments.sandboxes() == []
    assert quiet_node.leftovers() == []
    made.dhcp.stop()


# -- netlink, as far as it goes without a card that has VFs


def test_a_host_link_moves_into_the_pod_with_its_name_mac_mtu_and_addresses(card_node: Node) -> None:
    path = str(card_node.node.netns_dir / "vst-functions")
    netns.delete(path)
    netns.create(path)
    try:
        netns.run_inside(path, lambda: pod_links.build((), 0))  # from then on new links have no IPv6
        ip("link", "add", "vstfn1", "type", "veth", "peer", "name", "vstfn1p")
        function = NicFunction(
            "eth0", VF, "iavf", "0a:58:0a:01:00:07", 1400, (), (), ("10.1.0.7/24", "fd00::7/64"), alias="vf7"
        )
        host_links = NetlinkHostLinks()
        assert not host_links.is_in("eth0", path)
        host_links.move_in("vstfn1", function, path)
        assert host_links.is_in("eth0", path)
        shown = ip("-n", "vst-functions", "-o", "link", "show", "eth0")
        assert "0a:58:0a:01:00:07" in shown
        assert "mtu 1400" in shown
        assert "alias vf7" in shown
        shown = ip("-n", "vst-functions", "-o", "addr", "show", "eth0")
        assert "10.1.0.7/24" in shown
        assert "fd00::7/64" in shown
        assert "vstfn1:" not in ip("-o", "link")
    finally:
        netns.delete(path)


def test_the_kernel_understands_the_messages_that_configure_a_vf(card_node: Node) -> None:
    """A link without VFs refuses such messages as not supported; an unreadable message would be invalid."""
    ip("link", "add", "vstfn2", "type", "veth", "peer", "name", "vstfn2p")
    try:
        for name, value in SET.to_json().items():
            if name not in ("qos", "protocol", "min_tx_rate"):  # they go with others
                with pytest.raises(TapmanagerError, match="Operation not supported"):
                    NetlinkHostLinks().set_vf("vstfn2", 0, VfSettings(**{name: value}))  # type: ignore[arg-type]  # by name
        assert NetlinkHostLinks().vf_settings("vstfn2", 0) is None
        with pytest.raises(TapmanagerError, match="vstfn9 is gone"):
            NetlinkHostLinks().set_vf("vstfn9", 0, VfSettings(trust=False))
    finally:
        ip("link", "del", "vstfn2")
