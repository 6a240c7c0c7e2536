"""Without cloud-init, the kernel and DHCPv6 clients configure IPv6 from the tap's messages, and nobody else can send
them any."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address
from pathlib import Path

import pytest
from ipv6_guest import NIC, Ipv6Guest, decoded
from tap_node import TapNode, sandbox, until

from tapmanager.ipv6 import discovery, frame
from tapmanager.ipv6.frame import Packet, stand_in_address, stand_in_mac
from tapmanager.ipv6.lease import OPT_CLIENT_ID, REPLY, build_message
from tapmanager.links import netns

pytestmark = pytest.mark.network

DNS = {
    "servers": ["10.96.0.10", "fd00:96::10"],
    "searches": ["default.svc.cluster.local", "cluster.local"],
    "options": [],
}
STAND_IN = str(stand_in_address(1))
BEYOND = "fd00:88::1"


def configure(node: TapNode, *, ipv4: bool = True, kind: str = "bridge", **more: object) -> None:
    ranges = [[{"subnet": f"{node.subnet}.0/24"}]] if ipv4 else []
    routes = [{"dst": "0.0.0.0/0"}] if ipv4 else []
    ipam = {
        "type": "host-local",
        "dataDir": str(node.leases),
        "ranges": [*ranges, [{"subnet": "fd00:89::/64"}]],
        "routes": [*routes, {"dst": "::/0"}],
    }
    node.configure({**node.bridge_plugin(ipam=ipam, ipMasq=False, **more), "type": kind})


@contextmanager
def guest(node: TapNode, which: str) -> Iterator[Ipv6Guest]:
    """A guest whose link is not up yet."""
    network = node.attach(which, dns=DNS)
    with Ipv6Guest(*node.fetch(which, network["fetch_key"])) as made:
        made.own = next(ip for ip in network["ips"] if ":" in ip)
        yield made
    node.release(which)


@pytest.fixture
def beyond() -> Iterator[str]:
    """Another network on the node itself, reachable only by the default route."""
    subprocess.run(["ip", "addr", "add", f"{BEYOND}/128", "dev", "lo"], check=True)
    yield BEYOND
    subprocess.run(["ip", "addr", "del", f"{BEYOND}/128", "dev", "lo"], check=True)


@pytest.mark.parametrize(
    ("ipv4", "plugin"),
    [
        pytest.param(True, "bridge", id="dual stack"),
        pytest.param(False, "ptp", marks=pytest.mark.full, id="IPv6 only, routed"),
    ],
)
def test_the_kernel_and_a_dhcp_client_configure_an_interface(
    quiet_node: TapNode, tmp_path: Path, beyond: str, ipv4: bool, plugin: str
) -> None:
    configure(quiet_node, ipv4=ipv4, kind=plugin, mtu=1420)
    quiet_node.start()
    which = sandbox()
    with guest(quiet_node, which) as one:
        one.up()
        assert one.wait_for_router() == STAND_IN
        ports = json.loads(quiet_node.inside(which, "bridge", "-j", "-d", "link"))
        extra = [port for port in ports if port["neigh_suppress"]]
        assert not [port for port in extra if port["flood"] or port["mcast_flood"] or port["bcast_flood"]], (
            "nothing is copied"
        )
        assert len(extra) == 1
        assert one.show("-6", "neigh", "show", STAND_IN)[0]["lladdr"] == stand_in_mac(1).hex(":")
        on_link = {"bridge": "fd00:89::/64", "ptp": "fd00:89::1"}[plugin]
        assert one.routes()[on_link] == ""
        assert one.run("cat", f"/proc/sys/net/ipv6/conf/{NIC}/mtu").strip() == "1420"
        assert one.addresses() == set(), "none of its own making"
        told = one.dhclient(tmp_path) / "BOUND6"
        until(told.exists, 60, "a lease")
        lease = dict(line.split("=", 1) for line in told.read_text().splitlines() if "=" in line)
        assert one.addresses() == {one.own} == {lease["new_ip6_address"]}
        assert lease["new_dhcp6_name_servers"] == "fd00:96::10"
        assert lease["new_dhcp6_domain_search"] == "default.svc.cluster.local. cluster.local."
        assert one.pings("fd00:89::1")
        assert one.pings(beyond)
        said = decoded(one.frames, tmp_path, "icmp6[0] = 134")
        assert said.count("Flags [managed, other stateful], pref medium, router lifetime 65535s") >= 1
        for part in ("mtu option (5), length 8 (1):  1420", ", Flags [onlink], valid time 65535s",
                     "rdnss option (25), length 24 (3):  lifetime 65535s, addr: fd00:96::10",
                     "domain(s): default.svc.cluster.local. cluster.local."):  # fmt: skip
            assert part in said
        said = decoded(one.frames, tmp_path, "udp port 546")
        assert "dhcp6 advertise" in said
        assert f"(IA_ADDR {one.own} pltime:86400 vltime:86400)" in said
        assert "bad" not in said


def test_a_restarted_client_can_confirm_and_release_its_address(quiet_node: TapNode, tmp_path: Path) -> None:
    configure(quiet_node)
    quiet_node.start()
    with guest(quiet_node, sandbox()) as one:
        one.up()
        until((one.dhclient(tmp_path) / "BOUND6").exists, 60, "a lease")
        until(lambda: one.has_kept_lease(tmp_path), 60, "the lease on disk, without which a client asks for a new one")
        one.end_client()
        (tmp_path / "BOUND6").unlink(missing_ok=True)
        one.sent.clear()
        until((one.dhclient(tmp_path) / "BOUND6").exists, 60, "the lease again")
        assert "dhcp6 confirm" in decoded(one.sent, tmp_path, "udp port 547")
        assert "(status-code Success)" in decoded(one.frames, tmp_path, "udp port 546")
        one.end_client()
        (tmp_path / "BOUND6").unlink(missing_ok=True)
        until((one.dhclient(tmp_path, "-r") / "RELEASE6").exists, 60, "the lease given back")
        assert one.addresses() == set()
        one.dhclient(tmp_path, "-S")
        until(lambda: "dhcp6 inf-req" in decoded(one.sent, tmp_path, "udp port 547"), 60, "information")


def test_nothing_is_lost_while_tapmanager_is_down(quiet_node: TapNode, tmp_path: Path, beyond: str) -> None:
    configure(quiet_node)
    quiet_node.start()
    with guest(quiet_node, sandbox()) as one:
        one.up()
        until((one.dhclient(tmp_path) / "BOUND6").exists, 60, "a lease")
        one.wait_for_router()
        quiet_node.stop(signal.SIGKILL)
        one.run("ip", "-6", "neigh", "flush", "dev", NIC)
        assert one.pings(beyond), "the router is found without tapmanager"
        neighbours = one.show("-6", "neigh", "show", STAND_IN)
        assert "router" in neighbours[0], "and stays a router"
        one.frames.clear()
        quiet_node.start()
        until(lambda: decoded(one.frames, tmp_path, "icmp6[0] = 134"), 60, "an advertisement after the start")
        assert "router lifetime 0s" not in decoded(one.frames, tmp_path, "icmp6[0] = 134")
        one.end_client()
        (tmp_path / "BOUND6").unlink(missing_ok=True)
        until((one.dhclient(tmp_path) / "BOUND6").exists, 60, "the lease confirmed")
        assert one.pings(beyond)


def events_of(path: str) -> socket.socket:
    """Collects all events of links and bridge ports in a namespace from now on."""
    heard = netns.run_inside(path, lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE))
    heard.setblocking(False)
    heard.bind((0, 1))  # RTMGRP_LINK
    return heard


def changes(events: socket.socket, port: int) -> int:
    """How often a setting of that bridge port was changed. A late report of the link's state does not count."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            family, index = struct.unpack_from("=16xB3xi", events.recv(65536))
            count += (family, index) == (socket.AF_BRIDGE, port)
    return count


def test_a_gateway_with_a_new_mac_costs_one_rule_and_no_guest_connection(
    quiet_node: TapNode, tmp_path: Path, beyond: str
) -> None:
    configure(quiet_node)
    quiet_node.start()
    which, card = sandbox(), "02:00:00:ca:4d:02"

    def rules() -> str:
        return quiet_node.inside(which, "nft", "list", "ruleset")

    with contextlib.ExitStack() as held:
        one = held.enter_context(guest(quiet_node, which))
        one.up()
        one.wait_for_router()
        until((one.dhclient(tmp_path) / "BOUND6").exists, 60, "a lease")
        assert one.pings(beyond)
        server = held.enter_context(socket.create_server((beyond, 0), family=socket.AF_INET6))
        port = server.getsockname()[1]
        client = held.enter_context(netns.run_inside(one.path, lambda: socket.create_connection((beyond, port), 60)))
        there = held.enter_context(server.accept()[0])
        there.settimeout(60)
        assert card not in rules()
        behind = json.loads(quiet_node.inside(which, "ip", "-j", "link", "show", "virtshim-tap0"))[0]["ifindex"]
        events = held.enter_context(events_of(str(quiet_node.netns_of(which))))
        subprocess.run(["sysctl", "-qw", f"net.ipv6.conf.{quiet_node.bridge}.ndisc_notify=1"], check=True)
        subprocess.run(["ip", "link", "set", quiet_node.bridge, "address", card], check=True)
        until(lambda: f"ether daddr set {card}" in rules(), 60, "frames to the other card")
        assert rules().count("ether daddr set") == 1
        client.sendall(b"still here")
        assert there.recv(64) == b"still here"
        assert changes(events, behind) == 0


OLD_GUARD = """
flush chain bridge virtshim-dhcp forward
add rule bridge virtshim-dhcp forward ether type ip ip protocol udp udp dport 67 drop
add rule bridge virtshim-dhcp forward ether type ip ip protocol udp udp sport 67 drop
"""


def test_tapmanager_adds_ipv6_filters_to_pods_of_an_earlier_version(quiet_node: TapNode) -> None:
    configure(quiet_node)
    quiet_node.start()
    which = sandbox()
    quiet_node.attach(which)

    def guard() -> str:
        return quiet_node.inside(which, "nft", "list", "table", "bridge", "virtshim-dhcp")

    new = guard()
    quiet_node.inside(which, "nft", OLD_GUARD)
    assert guard() != new
    quiet_node.stop()
    quiet_node.start()
    assert guard() == new
    quiet_node.release(which)


ROUTED = """
    inside() {{ ip -n $(basename $CNI_NETNS) "$@"; }}
    test $CNI_COMMAND = DEL && {{ ip link del {link}; exit 0; }}
    ip link add {link} type veth peer eth0 netns $(basename $CNI_NETNS)
    ip addr add fe80::1/64 dev {link} nodad
    sysctl -qw net.ipv6.conf.{link}.forwarding=1
    ip link set {link} up && inside link set eth0 up
    ip route add fd00:90:33::2/128 dev {link}
    inside addr add fd00:90:33::2/128 dev eth0 nodad
    inside route add fd00:91::/64 via fe80::1 dev eth0
    inside route add default via fe80::1 dev eth0
    echo '{{"cniVersion": "1.0.0", "interfaces": [{{"name": "eth0", "sandbox": "'$CNI_NETNS'"}}],
            "ips": [{{"address": "fd00:90:33::2/128", "interface": 0}}]}}'
"""


def test_a_link_local_gateway_is_the_guests_router(quiet_node: TapNode, tmp_path: Path, beyond: str) -> None:
    which = sandbox()
    quiet_node.plugin("routed", ROUTED.format(link=f"sp{which[:9]}"))
    quiet_node.configure({"type": "routed"})
    quiet_node.start()
    with guest(quiet_node, which) as one:
        one.up()
        assert one.wait_for_router() == "fe80::1"
        assert one.routes()["fd00:91::/64"] == "fe80::1"
        until((one.dhclient(tmp_path) / "BOUND6").exists, 60, "a lease")
        assert one.addresses() == {"fd00:90:33::2"}
        assert one.pings(beyond)


# -- what others say -----------------------------------------------------------------------------------------------------

ROGUE, ROGUE_MAC = IPv6Address("fe80::bad"), bytes.fromhex("02deadbeef01")
MARK = b"ROGUE!"


def advertisement(mac: bytes, source: IPv6Address) -> bytes:
    body = discovery.advertisement(1800, [discovery.source_mac(MARK)])
    return frame.build(Packet(mac, frame.group_mac(frame.ALL_NODES), source, frame.ALL_NODES, frame.ICMP, body))


def dhcp(mac: bytes, source: IPv6Address, target: IPv6Address, from_port: int, to_port: int) -> bytes:
    body = frame.udp(from_port, to_port, build_message(REPLY, MARK[:3], [(OPT_CLIENT_ID, MARK)]))
    return frame.build(Packet(mac, frame.group_mac(target), source, target, frame.UDP, body))


def neighbour(mac: bytes, source: IPv6Address, target: IPv6Address) -> bytes:
    body = b"\x88\0\0\0\xa0\0\0\0" + target.packed + b"\2\1" + MARK
    return frame.build(Packet(mac, frame.group_mac(frame.ALL_NODES), source, frame.ALL_NODES, frame.ICMP, body))


def forged(mac: bytes, source: IPv6Address) -> dict[str, bytes]:
    """Messages that only tapmanager may send to a guest, and that a guest may not send to others."""
    return {
        "a router advertisement": advertisement(mac, source),
        "a DHCPv6 answer": dhcp(mac, source, frame.ALL_NODES, 547, 546),
        "a DHCPv6 answer from another port": dhcp(mac, source, frame.ALL_NODES, 9999, 546),
        "a DHCPv6 request": dhcp(mac, source, frame.DHCP_SERVERS, 546, 547),
        "the stand-in's neighbour advertisement": neighbour(mac, source, stand_in_address(1)),
        "a packet of the stand-in's": neighbour(mac, stand_in_address(1), IPv6Address("fe80::77")),
    }


@pytest.mark.parametrize("chosen", [pytest.param("off", marks=pytest.mark.full), "mac+ip"])
def test_only_tapmanager_sends_router_advertisements_and_leases_to_a_guest(quiet_node: TapNode, chosen: str) -> None:
    configure(quiet_node)
    quiet_node.start("--filter", chosen)
    with (
        guest(quiet_node, sandbox()) as one,
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as outside,
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as port,
    ):
        outside.bind((quiet_node.bridge, 3))
        port.bind((next(iter(quiet_node.ports())), 3))
        outside.settimeout(60)
        one.up()
        one.wait_for_router()
        mac = one.mac
        sound = neighbour(ROGUE_MAC, ROGUE, ROGUE)  # passes, and comes after the others
        for data in (*forged(ROGUE_MAC, ROGUE).values(), sound):
            port.send(data)
        until(lambda: sound in one.frames, 60, "the last frame")
        assert [name for name, data in forged(ROGUE_MAC, ROGUE).items() if data in one.frames] == []
        own = IPv6Address(b"\xfe\x80" + bytes(6) + bytes([mac[0] ^ 2, *mac[1:3], 0xFF, 0xFE, *mac[3:]]))
        last = neighbour(mac, own, own)  # unasked, as an address that moves is advertised
        for data in (*forged(mac, own).values(), last):
            one.emit(data)
        seen = [outside.recv(2048)]
        while seen[-1] != last:
            seen.append(outside.recv(2048))
        assert [name for name, data in forged(mac, own).items() if data in seen] == []
        assert not [data for data in seen if data[12:14] == b"\x86\xdd" and data[20] == 58 and data[54] in (133, 134)]
