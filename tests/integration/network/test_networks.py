"""A pod can have several networks. A meta plugin of our own keeps records as Multus does, and runs the distribution's
plugins."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

import pytest
from fakes import meta_plugin
from tap_node import PLUGINS, TapNode, sandbox, until
from toy_guest import ToyGuest

from tapmanager import protocol
from tapmanager.dhcp import packet
from tapmanager.dhcp.packet import BROADCAST_IP, BROADCAST_MAC, Datagram, build_frame
from tapmanager.ipv6 import discovery
from tapmanager.ipv6 import frame as ipv6

pytestmark = pytest.mark.network

# MAC, addresses and routes of the interface, after ADD and before DEL.
WATCHED = """
ip() {{ command ip -n $(basename $CNI_NETNS) -o "$@" dev $CNI_IFNAME; }}
look() {{ (ip link show | grep -o 'link/ether [0-9a-f:]*'; ip -4 addr show | awk '{{print $4}}'
    ip route show | awk '{{print $1, $2 == "via" ? $3 : "on-link"}}' | sort) > {folder}/at.$CNI_COMMAND; }}
test $CNI_COMMAND = DEL && look
{plugins}/ptp; status=$?
test $CNI_COMMAND = ADD && look
exit $status
"""


class Networks:
    """A node whose pods have the node's own bridge, and more."""

    def __init__(self, node: TapNode) -> None:
        self.node = node
        self.tag = secrets.token_hex(2)
        self.records = node.folder / "multus"
        node.plugin("meta", f"exec {sys.executable} {meta_plugin.__file__}\n")

    def subnet(self, number: int) -> str:
        """A subnet of 10.90.0.0/16, which nothing else on the machine uses, with its own third octet."""
        return f"10.90.{number}"

    def delegate(self, number: int, kind: str, **more: object) -> dict[str, object]:
        """A delegate with addresses and a default route."""
        ipam = {
            "type": "host-local",
            "dataDir": str(self.node.leases),
            "ranges": [[{"subnet": f"{self.subnet(number)}.0/24"}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        return {"name": f"n{number}-{self.tag}", "type": kind, "ipam": ipam, **more}

    def configure(self, *others: dict[str, object], records: bool = True, **first: object) -> None:
        delegates = [{"name": self.node.network, **self.node.bridge_plugin(**first)}, *others]
        kept = {"cniDir": str(self.records)} if records else {}
        self.node.configure({"type": "meta", "delegates": delegates, **kept})

    @contextlib.contextmanager
    def guest(self, which: str, network: dict[str, object]) -> Iterator[list[ToyGuest]]:
        """One toy guest for each NIC, in order."""
        nics, fds = self.node.fetch(which, network["fetch_key"])
        with contextlib.ExitStack() as toys:
            yield [toys.enter_context(ToyGuest(fd, nic["mac"])) for nic, fd in zip(nics, fds, strict=True)]

    def nothing_is_left(self) -> None:
        until(lambda: not self.node.leftovers(), what="the first network's side gone")
        assert [path for path in self.node.leases.rglob("10.90.*") if path.is_file()] == []
        assert [path for path in self.records.rglob("*") if path.is_file()] == []


@pytest.fixture
def networks(tap_node: TapNode) -> Iterator[Networks]:
    made = Networks(tap_node)
    yield made
    for _, name in socket.if_nameindex():
        if made.tag in name:
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)  # the peer goes with it


def nics_of(network: dict[str, object]) -> dict[str, dict[str, object]]:
    return {nic["name"]: nic for nic in network["interfaces"]}


@pytest.mark.parametrize("records", [True, False], ids=["recorded", "unrecorded"])
def test_a_guest_has_a_nic_on_each_of_its_pods_networks(networks: Networks, records: bool) -> None:
    blue, plain = f"b{networks.tag}", f"p{networks.tag}"
    networks.configure(
        networks.delegate(2, "bridge", bridge=blue, isGateway=True),
        {"name": "plain", "type": "bridge", "bridge": plain, "interface": "lan"},
        records=records,
    )
    which = sandbox()
    network = networks.node.attach(which)
    assert list(nics_of(network)) == ["eth0", "lan", "net1"]
    assert network["ips"] == [nics_of(network)["eth0"]["addresses"][0].split("/")[0]]
    assert nics_of(network)["eth0"]["routes"] == [{"destination": "0.0.0.0/0", "gateway": f"{networks.node.subnet}.1"}]
    assert nics_of(network)["net1"]["addresses"] == ["10.90.2.2/24"]
    assert nics_of(network)["net1"]["routes"] == []
    assert nics_of(network)["lan"]["addresses"] == []
    with networks.guest(which, network) as toys:
        by_mac = {toy.mac.hex(":"): toy for toy in toys}
        for name, gateway in (("eth0", f"{networks.node.subnet}.1"), ("net1", "10.90.2.1")):
            toy = by_mac[nics_of(network)[name]["mac"]]
            assert f"{toy.boot().yiaddr}/24" == nics_of(network)[name]["addresses"][0]
            toy.ping(toy.resolve(IPv4Address(gateway)), IPv4Address(gateway))
    networks.node.release(which)
    networks.nothing_is_left()


def test_each_plugin_finds_its_interface_unchanged_at_del(networks: Networks) -> None:
    networks.node.plugin("watched", WATCHED.format(folder=networks.node.folder, plugins=PLUGINS))
    networks.configure(networks.delegate(3, "watched", ipMasq=True, mtu=1400))
    which = sandbox()
    nic = nics_of(networks.node.attach(which))["net1"]
    assert (nic["mtu"], nic["addresses"]) == (1400, ["10.90.3.2/32"])
    networks.node.stop(signal.SIGKILL)
    networks.node.start()
    networks.node.release(which)
    at_add = (networks.node.folder / "at.ADD").read_text().splitlines()
    assert at_add == [
        f"link/ether {nic['mac']}", "10.90.3.2/24",
        "10.90.3.0/24 10.90.3.1", "10.90.3.1 on-link", "default 10.90.3.1",
    ]  # fmt: skip
    assert (networks.node.folder / "at.DEL").read_text().splitlines() == at_add
    assert "10.90.3." not in masquerading()
    networks.nothing_is_left()


def test_a_restarted_tapmanager_serves_all_networks_again(networks: Networks) -> None:
    networks.configure(networks.delegate(4, "bridge", bridge=f"b{networks.tag}", isGateway=True))
    which = sandbox()
    network = networks.node.attach(which)
    networks.node.stop(signal.SIGKILL)
    networks.node.start()
    assert networks.node.attach(which) == network
    with networks.guest(which, network) as (first, second):
        assert [str(first.boot().yiaddr), str(second.boot().yiaddr)] == [network["ips"][0], "10.90.4.2"]
    networks.node.release(which)
    networks.nothing_is_left()


def test_without_the_namespace_del_still_removes_all_rules(networks: Networks) -> None:
    """ptp and bridge read the addresses that they masquerade off the pod's interface."""
    networks.configure(networks.delegate(10, "ptp", ipMasq=True))
    which = sandbox()
    networks.node.attach(which)
    assert "10.90.10.2" in masquerading()
    subprocess.run(["ip", "netns", "del", networks.node.netns_of(which).name], check=True)
    networks.node.release(which)
    assert "10.90.10." not in masquerading()
    networks.nothing_is_left()


def masquerading() -> str:
    return subprocess.run(["iptables-save", "-t", "nat"], capture_output=True, text=True, check=True).stdout


# A tapmanager that dies before it builds a pod's last NIC.
DIES = """
import os, signal, sys
from tapmanager import __main__
from tapmanager.links import pod_links
build = pod_links.build
def build_all_but_the_last(nics, tap_owner):
    build(nics[:-1], tap_owner)
    with open({built!r}, "w") as file:
        file.write(" ".join(nic.link for nic in nics[:-1]))
    os.kill(os.getpid(), signal.SIGKILL)
pod_links.build = build_all_but_the_last
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_after_a_kill_between_two_nics_both_links_are_restored_before_del(networks: Networks) -> None:
    node = networks.node
    node.plugin("watched", WATCHED.format(folder=node.folder, plugins=PLUGINS))
    networks.configure(networks.delegate(11, "watched"), networks.delegate(12, "bridge", bridge=f"b{networks.tag}"))
    node.stop()
    usual, node.program = node.program, ("-c", DIES.format(built=str(node.folder / "built")))
    node.start()
    which = sandbox()
    with pytest.raises(ConnectionResetError):
        node.attach(which)
    assert node.process is not None
    assert node.process.wait(60) == -signal.SIGKILL
    assert (node.folder / "built").read_text() == "eth0 net1"
    node.program = usual
    node.start()
    assert node.listed() == [which]
    node.release(which)
    at_add = (node.folder / "at.ADD").read_text()
    assert "default 10.90.11.1" in at_add
    assert (node.folder / "at.DEL").read_text() == at_add
    networks.nothing_is_left()


def test_the_network_that_the_pod_chooses_has_the_default_route(networks: Networks) -> None:
    networks.configure(
        networks.delegate(5, "bridge", bridge=f"b{networks.tag}", isGateway=True),
        changed={"routes": []},  # what Multus does to the first one's record
    )
    which = sandbox()
    nics = nics_of(networks.node.attach(which))
    assert nics["eth0"]["routes"] == []
    assert nics["net1"]["routes"] == [{"destination": "0.0.0.0/0", "gateway": "10.90.5.1"}]
    networks.node.release(which)
    networks.nothing_is_left()


def test_an_unsupported_network_is_refused_and_all_networks_are_undone(networks: Networks) -> None:
    wire = f"w{networks.tag}"
    command = ["ip", "link", "add", wire, "type", "veth", "peer", "name", f"{wire}p"]
    subprocess.run(command, check=True)
    networks.configure(
        networks.delegate(6, "bridge", bridge=f"b{networks.tag}"), networks.delegate(7, "macvlan", master=wire)
    )
    with pytest.raises(protocol.RemoteError, match=f'"net2" of network "n7-{networks.tag}" is of kind macvlan') as told:
        networks.node.attach(sandbox())
    assert told.value.kind == "unimplemented"
    assert networks.node.listed() == []
    networks.nothing_is_left()


def test_source_based_routing_is_refused_for_an_older_virtshim_and_undone(
    networks: Networks,
) -> None:
    """The distribution's sbr is used, after a plugin that makes the interface. An earlier virtshim does not ask for
    routing rules."""
    networks.node.plugin("routed", f"""
        given=$(cat)
        result=$(echo "$given" | {PLUGINS}/ptp) || {{ echo "$result"; exit 1; }}
        test $CNI_COMMAND = ADD || exit 0
        echo "$given" | sed "s|^{{|{{\\"prevResult\\": $(echo $result),|" | {PLUGINS}/sbr
    """)  # fmt: skip
    networks.configure(networks.delegate(13, "routed"))
    with pytest.raises(protocol.RemoteError, match=r'"net1" has routes.*: lookup 100.*restart virtshim') as told:
        networks.node.attach(sandbox())
    assert told.value.kind == "unimplemented"
    assert networks.node.listed() == []
    networks.nothing_is_left()


def test_a_failed_del_of_one_network_is_reported_and_the_others_are_released(networks: Networks) -> None:
    networks.node.plugin(
        "sour", f"test -e {networks.node.folder}/sour && test $CNI_COMMAND = DEL && exit 1\nexec {PLUGINS}/bridge\n"
    )
    networks.configure(networks.delegate(8, "sour", bridge=f"b{networks.tag}"))
    which = sandbox()
    networks.node.attach(which)
    trouble = networks.node.folder / "sour"
    trouble.touch()
    with pytest.raises(protocol.RemoteError, match="meta"):
        networks.node.release(which)
    assert networks.node.listed() == [which]
    assert networks.node.leased() == set()
    trouble.unlink()
    networks.node.release(which)
    networks.nothing_is_left()


def test_a_network_without_addresses_passes_outside_dhcp_but_the_first_one_does_not(
    networks: Networks,
) -> None:
    """An outside server answers on the second network; requests on the first do not leave the tap."""
    plain = f"p{networks.tag}"
    networks.configure({"name": "plain", "type": "bridge", "bridge": plain})
    which = sandbox()
    network = networks.node.attach(which)
    with networks.guest(which, network) as (first, second), sniffer(plain) as lan, sniffer(networks.node.bridge) as own:
        first.boot()
        gateway = IPv4Address(f"{networks.node.subnet}.1")
        first.ping(first.resolve(gateway), gateway)
        asked = build_frame(Datagram(second.mac, BROADCAST_MAC, packet.ANY, BROADCAST_IP, 68, 67, b"WHO" * 90))
        second.send(asked)
        until(lambda: any(b"WHO" in data for data in received(lan)), what="the request on the second network")
        answer = Datagram(b"\x02" + bytes(5), second.mac, IPv4Address("192.0.2.1"), BROADCAST_IP, 67, 68, b"YOU" * 90)
        lan.send(build_frame(answer))
        second.wait_for(lambda data: b"YOU" in data)
        router = IPv6Address("fe80::1")
        said = discovery.advertisement(0, [discovery.source_mac(b"ROUTER")])
        lan.send(ipv6.build(ipv6.Packet(b"\x02" + bytes(5), second.mac, router, ipv6.ALL_NODES, ipv6.ICMP, said)))
        second.wait_for(lambda data: b"ROUTER" in data)
        seen = received(own)
    assert seen
    assert not [data for data in seen if is_dhcp(data)]
    networks.node.release(which)
    networks.nothing_is_left()


def is_dhcp(data: bytes) -> bool:
    return data[12:14] == b"\x08\0" and data[23] == 17 and data[36:38] == b"\0\x43"


def received(sock: socket.socket) -> list[bytes]:
    """The received frames, until none arrives for a moment."""
    found = []
    with contextlib.suppress(TimeoutError):
        while True:
            found.append(sock.recv(2048))
    return found


def sniffer(link: str) -> socket.socket:
    """A packet socket on the host's side of `link`."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind((link, 3))
    sock.settimeout(0.5)
    return sock
