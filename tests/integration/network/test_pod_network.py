"""A pod's network works from attach to release, as guest, host and another pod see it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from pathlib import Path

import pytest
from kernel_guest import KernelGuest
from tap_node import PLUGINS, TapNode, sandbox, until

from tapmanager import protocol
from tapmanager.dhcp import packet
from tapmanager.dhcp.packet import BROADCAST_IP, Datagram, build_frame

pytestmark = pytest.mark.network


def ping(address: str) -> bool:
    return subprocess.run(["ping", "-c1", "-W2", address], capture_output=True, check=False).returncode == 0


def sniffer(link: str):
    """A packet socket on the host's side of `link`."""
    import socket

    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind((link, 3))
    sock.settimeout(0.2)
    return sock


def test_attach_describes_the_network_and_release_leaves_nothing(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which)
    (nic,) = network["interfaces"]
    assert network["netns"] == str(tap_node.netns_of(which))
    assert network["ips"] == [nic["addresses"][0].split("/")[0]]
    assert network["ips"][0].startswith(tap_node.subnet + ".")
    assert nic["name"] == "eth0"
    assert nic["routes"] == [{"destination": "0.0.0.0/0", "gateway": f"{tap_node.subnet}.1"}]
    assert len(network["fetch_key"]) == 64
    assert tap_node.listed() == [which]
    assert tap_node.nat_rules() != []
    tap_node.release(which)
    assert tap_node.listed() == []
    assert not tap_node.netns_of(which).exists()
    until(lambda: not tap_node.leftovers(), what="the host's side gone")


def test_a_pod_has_the_address_that_it_wants_if_the_plugin_can_and_the_address_is_free(tap_node: TapNode) -> None:
    tap_node.configure(tap_node.bridge_plugin(capabilities={"ips": True}))
    wanted = {"eth0": [f"{tap_node.subnet}.77/24"]}
    first, second, third = sandbox(), sandbox(), sandbox()
    assert tap_node.attach(first, addresses=wanted)["ips"] == [f"{tap_node.subnet}.77"]
    (other,) = tap_node.attach(second, addresses=wanted)["ips"]
    assert other != f"{tap_node.subnet}.77"
    assert tap_node.attach(second, addresses=wanted)["ips"] == [other], "a repeated call attaches nothing"
    (from_elsewhere,) = tap_node.attach(third, addresses={"eth0": ["192.0.2.7/24"]})["ips"]
    assert from_elsewhere.startswith(f"{tap_node.subnet}.")
    for which in (first, second, third):
        tap_node.release(which)
    until(lambda: not tap_node.leftovers(), what="the host's side gone")


def test_a_plugin_without_the_capability_decides_about_the_address(tap_node: TapNode) -> None:
    which = sandbox()
    (address,) = tap_node.attach(which, addresses={"eth0": [f"{tap_node.subnet}.77/24"]})["ips"]
    assert address != f"{tap_node.subnet}.77"
    tap_node.release(which)


def test_a_plugin_that_pins_macs_pins_the_one_that_the_vm_keeps(tap_node: TapNode) -> None:
    tap_node.configure(tap_node.bridge_plugin(macspoofchk=True))
    which, kept = sandbox(), "0a:58:0a:01:02:03"
    network = tap_node.attach(which, macs={"eth0": kept})
    assert [nic["mac"] for nic in network["interfaces"]] == [kept]
    with tap_node.guest(which, network) as guest:
        guest.boot()
        gateway = IPv4Address(f"{tap_node.subnet}.1")
        guest.ping(guest.resolve(gateway), gateway)
    tap_node.release(which)


def test_a_guest_boots_by_dhcp_and_talks_to_the_host_both_ways(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which, name="web-7d4b9c-x2x", hostname="web")
    with tap_node.guest(which, network) as guest:
        ack = guest.boot()
        assert str(ack.yiaddr) == network["ips"][0]
        gateway = IPv4Address(f"{tap_node.subnet}.1")
        assert ack.address(packet.OPT_ROUTER) == gateway
        assert ack.options[packet.OPT_DNS] == IPv4Address("10.96.0.10").packed
        assert ack.options[packet.OPT_SEARCH] == packet.encode_search(("default.svc.cluster.local", "cluster.local"))
        assert ack.options[packet.OPT_HOSTNAME] == b"web"
        assert ack.options[packet.OPT_MTU] == (1500).to_bytes(2, "big")
        guest.ping(guest.resolve(gateway), gateway)
        assert ping(network["ips"][0])
    tap_node.release(which)


def test_two_guests_talk_to_each_other(tap_node: TapNode) -> None:
    first, second = sandbox(), sandbox()
    one, two = tap_node.attach(first), tap_node.attach(second)
    with tap_node.guest(first, one) as left, tap_node.guest(second, two) as right:
        left.boot()
        right.boot()
        assert right.address is not None
        mac = left.resolve(right.address)
        assert mac == right.mac
        left.ping(mac, right.address)
    tap_node.release(first)
    tap_node.release(second)


def test_a_guest_renews_rebinds_reboots_and_asks_for_information(tap_node: TapNode) -> None:
    which = sandbox()
    with tap_node.guest(which, tap_node.attach(which)) as guest:
        ack = guest.boot()
        for source in (ack.yiaddr, packet.ANY):
            datagram, again = guest.dhcp(packet.REQUEST, source=source, ciaddr=ack.yiaddr)
            assert (again.kind, again.yiaddr, datagram.target) == (packet.ACK, ack.yiaddr, ack.yiaddr)
        _, again = guest.dhcp(packet.REQUEST, options={packet.OPT_REQUESTED_IP: ack.yiaddr.packed})
        assert again.kind == packet.ACK
        _, refused = guest.dhcp(packet.REQUEST, options={packet.OPT_REQUESTED_IP: bytes([192, 168, 1, 9])})
        assert refused.kind == packet.NAK
        _, informed = guest.dhcp(packet.INFORM, ciaddr=ack.yiaddr)
        assert (informed.kind, informed.yiaddr) == (packet.ACK, packet.ANY)
    tap_node.release(which)


def test_a_guest_that_leaves_checksums_to_the_host_is_answered(tap_node: TapNode) -> None:
    which = sandbox()
    with tap_node.guest(which, tap_node.attach(which)) as guest:
        _, offer = guest.dhcp(packet.DISCOVER, offload=True)
        assert offer.kind == packet.OFFER
    tap_node.release(which)


def test_a_flood_of_garbage_from_one_guest_does_not_stop_dhcp_for_others(tap_node: TapNode) -> None:
    first, second = sandbox(), sandbox()
    one, two = tap_node.attach(first), tap_node.attach(second)
    with tap_node.guest(first, one) as bad, tap_node.guest(second, two) as good:
        noise = build_frame(Datagram(bad.mac, b"\xff" * 6, packet.ANY, BROADCAST_IP, 68, 67, b"\x01" * 300))
        for _ in range(2000):
            bad.send(noise)
        over = threading.Event()

        def goes_on() -> None:
            while not over.is_set():
                bad.send(noise)

        flood = threading.Thread(target=goes_on)
        flood.start()
        try:
            until(lambda: b"dhcp.flooded" in tap_node.log.read_bytes(), what="the flood noticed")
            good.boot()
        finally:
            over.set()
            flood.join()
        bad.boot()
    tap_node.release(first)
    tap_node.release(second)


def test_dhcp_never_crosses_between_guest_and_network(tap_node: TapNode) -> None:
    """Requests stay on the tap, and an outside server's offer does not reach the guest."""
    which = sandbox()
    network = tap_node.attach(which)
    with sniffer(tap_node.bridge) as outside, tap_node.guest(which, network) as guest:
        guest.boot()
        gateway = IPv4Address(f"{tap_node.subnet}.1")
        mac = guest.resolve(gateway)
        rogue = Datagram(mac, guest.mac, gateway, BROADCAST_IP, 67, 68, b"ROGUE" * 60)
        port = next(iter(tap_node.ports()))
        with sniffer(port) as wire:
            wire.send(build_frame(rogue))
        with sniffer(tap_node.bridge) as wire:
            wire.send(build_frame(rogue))
        # Ordered after the frames above on the same wire: once this came, those would have come.
        guest.ping(mac, gateway)
        assert not [data for data in guest.frames if b"ROGUE" in data]
        seen = []
        try:
            while True:
                seen.append(outside.recv(2048))
        except TimeoutError:
            pass
        assert seen
        assert not [data for data in seen if data[12:14] == b"\x08\0" and data[23] == 17 and data[34:36] == b"\0\x44"]
    tap_node.release(which)


def test_the_namespace_itself_is_silent(tap_node: TapNode) -> None:
    """With no guest there, nobody answers for its address, and nothing in the namespace has an address of its own."""
    which = sandbox()
    network = tap_node.attach(which)
    addresses = json.loads(tap_node.inside(which, "ip", "-j", "addr"))
    assert [one["ifname"] for one in addresses if one["addr_info"]] == ["lo"]
    assert tap_node.inside(which, "ip", "route") == ""
    assert tap_node.inside(which, "ip", "-6", "route") == ""
    assert not ping(network["ips"][0])
    neighbour = subprocess.run(
        ["ip", "-j", "neigh", "show", network["ips"][0]], capture_output=True, text=True, check=True
    )
    assert "lladdr" not in neighbour.stdout
    links = {one["ifname"]: one["address"] for one in addresses}
    assert network["interfaces"][0]["mac"] not in links.values()
    tap_node.release(which)


def test_ipv6_addresses_are_described_and_given_back(tap_node: TapNode) -> None:
    plugin = tap_node.bridge_plugin()
    ipam = dict(plugin["ipam"])
    ipam["ranges"] = [*ipam["ranges"], [{"subnet": "fd00:89::/64"}]]
    ipam["routes"] = [*ipam["routes"], {"dst": "::/0"}]
    tap_node.configure({**plugin, "ipam": ipam})
    which = sandbox()
    network = tap_node.attach(which)
    (nic,) = network["interfaces"]
    assert [IPv4Interface(nic["addresses"][0]).network.prefixlen, nic["addresses"][1][:10]] == [24, "fd00:89::2"]
    assert {"destination": "::/0", "gateway": "fd00:89::1"} in nic["routes"]
    tap_node.release(which)
    rules = subprocess.run(["ip6tables-save", "-t", "nat"], capture_output=True, text=True, check=True).stdout
    assert tap_node.network not in rules


def test_duplicate_address_detection_does_not_see_the_guests_own_packets(tap_node: TapNode) -> None:
    """The bridge reflects packets, and the guest's system does not mark its own probe."""
    ipam = {"type": "host-local", "dataDir": str(tap_node.leases), "ranges": [[{"subnet": "fd00:89::/64"}]]}
    tap_node.configure(tap_node.bridge_plugin(ipam=ipam, hairpinMode=True))
    which = sandbox()
    network = tap_node.attach(which)
    with KernelGuest(*tap_node.fetch(which, network["fetch_key"])) as guest:
        guest.run("sysctl", "-qw", "net.ipv6.conf.nic0.accept_dad=1", "net.ipv6.conf.nic0.enhanced_dad=0",
                  "net.ipv6.conf.all.enhanced_dad=0")  # fmt: skip
        guest.ip("link set nic0 up", f"address add {network['interfaces'][0]['addresses'][0]} dev nic0")

        def flags() -> str:
            return guest.run("ip", "-6", "-o", "address", "show", "dev", "nic0", "scope", "global")

        until(lambda: "tentative" not in flags() or "dadfailed" in flags(), 60, "the guest has looked")
        assert "dadfailed" not in flags()
    tap_node.release(which)


def test_ptp_s_guest_gets_a_host_address_and_reaches_its_gateway(tap_node: TapNode) -> None:
    tap_node.configure({**tap_node.bridge_plugin(), "type": "ptp"})
    which = sandbox()
    network = tap_node.attach(which)
    (nic,) = network["interfaces"]
    assert nic["addresses"][0].endswith("/32")
    gateway = IPv4Address(f"{tap_node.subnet}.1")
    with tap_node.guest(which, network) as guest:
        ack = guest.boot()
        assert ack.options[packet.OPT_MASK] == b"\xff" * 4
        routes = ack.options[packet.OPT_CLASSLESS_ROUTES]
        assert routes.startswith(packet.encode_routes([(IPv4Interface(f"{gateway}/32").network, packet.ANY)]))
        guest.ping(guest.resolve(gateway), gateway)
        assert ping(network["ips"][0])
    tap_node.release(which)


def test_the_mtu_of_the_cni_interface_reaches_the_guest(tap_node: TapNode) -> None:
    tap_node.configure(tap_node.bridge_plugin(mtu=1400))
    which = sandbox()
    network = tap_node.attach(which)
    assert network["interfaces"][0]["mtu"] == 1400
    links = {one["ifname"]: one["mtu"] for one in json.loads(tap_node.inside(which, "ip", "-j", "link"))}
    assert (links["br0"], links["tap0"], links["eth0"]) == (1400, 1400, 1400)
    nics, fds = tap_node.fetch(which, network["fetch_key"])
    protocol.close_all(fds)
    assert nics == [{"mac": network["interfaces"][0]["mac"], "mtu": 1400}]
    tap_node.release(which)


def test_the_guest_gets_the_smaller_mtu_of_a_route_everywhere(tap_node: TapNode) -> None:
    """Cilium does so for a tunnel: the link has a larger MTU, and others may send packets of that size."""
    tap_node.plugin("tunnelled", f"""
        {PLUGINS}/bridge || exit
        test $CNI_COMMAND != ADD || ip -n $(basename $CNI_NETNS) route change default via {tap_node.subnet}.1 mtu 1450
    """)  # fmt: skip
    tap_node.configure({**tap_node.bridge_plugin(), "type": "tunnelled"})
    which = sandbox()
    network = tap_node.attach(which)
    assert network["interfaces"][0]["mtu"] == 1450
    links = {one["ifname"]: one["mtu"] for one in json.loads(tap_node.inside(which, "ip", "-j", "link"))}
    assert (links["br0"], links["tap0"], links["eth0"]) == (1500, 1500, 1500)
    nics, fds = tap_node.fetch(which, network["fetch_key"])
    protocol.close_all(fds)
    assert nics == [{"mac": network["interfaces"][0]["mac"], "mtu": 1450}]
    with tap_node.guest(which, network) as guest:
        assert guest.boot().options[packet.OPT_MTU] == (1450).to_bytes(2, "big")
    tap_node.release(which)


def test_a_link_without_ethernet_is_refused_by_name_and_nothing_is_left(tap_node: TapNode) -> None:
    tap_node.plugin("packets", """
        ip() { command ip -n $(basename $CNI_NETNS) "$@"; }
        test $CNI_COMMAND = ADD || exit 0
        ip tuntap add mode tun $CNI_IFNAME && ip addr add 10.90.30.2/32 dev $CNI_IFNAME && ip link set $CNI_IFNAME up
        echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "'$CNI_IFNAME'", "sandbox": "'$CNI_NETNS'"}],
               "ips": [{"address": "10.90.30.2/32", "interface": 0}]}'
    """)  # fmt: skip
    tap_node.configure({"type": "packets"})
    with pytest.raises(protocol.RemoteError, match='"eth0" is of kind tun, which cannot carry') as told:
        tap_node.attach(sandbox())
    assert told.value.kind == "unimplemented"
    assert tap_node.listed() == []


def test_a_static_neighbour_of_the_plugin_resolves_even_without_tapmanager(
    tap_node: TapNode,
) -> None:
    """AWS's VPC CNI and Azure's do so: nobody on the wire answers for the gateway."""
    tap_node.plugin("written-down", """
        inside() { ip -n $(basename $CNI_NETNS) "$@"; }
        host=wd$(echo $CNI_CONTAINERID | cut -c1-9)
        test $CNI_COMMAND = DEL && { inside neigh > $0.at-del; ip link del $host; exit 0; }
        ip link add $host address 02:00:00:00:00:77 arp off type veth peer $CNI_IFNAME netns $(basename $CNI_NETNS)
        ip link set $host up && inside link set $CNI_IFNAME up && inside addr add 10.90.31.2/32 dev $CNI_IFNAME
        inside addr add fd00:90:31::2/128 dev $CNI_IFNAME nodad
        inside route add 169.254.1.1 dev $CNI_IFNAME scope link && inside route add default via 169.254.1.1
        inside route add default via fe80::1 dev $CNI_IFNAME
        for gateway in 169.254.1.1 fe80::1; do
          inside neigh add $gateway lladdr 02:00:00:00:00:77 dev $CNI_IFNAME nud permanent
        done
        echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "'$CNI_IFNAME'", "sandbox": "'$CNI_NETNS'"}],
               "ips": [{"address": "10.90.31.2/32", "interface": 0}, {"address": "fd00:90:31::2/128", "interface": 0}]}'
    """)  # fmt: skip
    tap_node.configure({"type": "written-down"})
    which, mac = sandbox(), bytes.fromhex("020000000077")
    network = tap_node.attach(which)
    with tap_node.guest(which, network) as guest:
        guest.boot()
        assert guest.resolve(IPv4Address("169.254.1.1")) == mac
        tap_node.stop(signal.SIGKILL)
        assert guest.resolve(IPv4Address("169.254.1.1")) == mac
        assert guest.resolve_6(IPv6Address("fe80::1"), IPv6Address("fd00:90:31::2")) == mac
        tap_node.start()
    tap_node.release(which)
    found = (tap_node.bin_dir / "written-down.at-del").read_text().splitlines()
    assert sorted(line.split()[0] for line in found if line.endswith("PERMANENT ")) == ["169.254.1.1", "fe80::1"]


def test_attach_and_release_may_be_repeated(tap_node: TapNode) -> None:
    which = sandbox()
    first = tap_node.attach(which)
    assert tap_node.attach(which) == first
    assert len(tap_node.leased()) == 1
    tap_node.release(which)
    tap_node.release(which)


def test_calls_for_one_sandbox_wait_for_each_other(tap_node: TapNode) -> None:
    which = sandbox()
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(tap_node.attach(which))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(one == results[0] for one in results)
    assert len(tap_node.leased()) == 1
    tap_node.release(which)


def test_releasing_an_unknown_pod_succeeds_and_removes_a_stray_namespace(tap_node: TapNode) -> None:
    which = sandbox()
    subprocess.run(["ip", "netns", "add", tap_node.netns_of(which).name], check=True)
    tap_node.release(which)
    assert not tap_node.netns_of(which).exists()


# -- fetch ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "0" * 64, "\u00e9"])
def test_a_wrong_key_opens_nothing(tap_node: TapNode, key: str) -> None:
    which = sandbox()
    tap_node.attach(which)
    with pytest.raises(protocol.RemoteError) as caught:
        tap_node.fetch(which, key)
    assert caught.value.kind == "permission"
    with pytest.raises(protocol.RemoteError) as unknown:
        tap_node.fetch(sandbox(), key)
    assert unknown.value.kind == "permission"
    tap_node.release(which)


def test_one_pods_key_does_not_open_anothers_network(tap_node: TapNode) -> None:
    first, second = sandbox(), sandbox()
    one = tap_node.attach(first)
    tap_node.attach(second)
    with pytest.raises(protocol.RemoteError) as caught:
        tap_node.fetch(second, one["fetch_key"])
    assert caught.value.kind == "permission"
    tap_node.release(first)
    tap_node.release(second)


def test_a_tap_has_one_user_at_a_time(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which)
    with tap_node.guest(which, network) as guest:
        guest.boot()
        with pytest.raises(protocol.RemoteError, match="is already running") as caught:
            tap_node.fetch(which, network["fetch_key"])
        assert caught.value.kind == "failed-precondition"
        timer = threading.Timer(0.3, guest.power_off)
        timer.start()
        with tap_node.guest(which, network) as successor:
            successor.boot()
        timer.join()
    tap_node.release(which)


# Prints, as JSON, the answer to one request of a process of another user.
_ASK = """
import json, os, sys
uid, path, verb, args = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
sys.path.insert(0, sys.argv[5])
from tapmanager import protocol
os.setgroups([]); os.setgid(int(sys.argv[6])); os.setuid(uid)
try:
    answer, fds = protocol.call(path, verb, args, 10)
    print(json.dumps({"ok": answer, "fds": len(fds)}))
except protocol.RemoteError as exc:
    print(json.dumps({"kind": exc.kind}))
except OSError as exc:
    print(json.dumps({"errno": type(exc).__name__}))
"""


def ask_as(node: TapNode, uid: int, gid: int, verb: str, args: dict[str, object]) -> dict[str, object]:
    project = str(Path(protocol.__file__).parent.parent)
    command = [sys.executable, "-c", _ASK, str(uid), node.socket, verb, json.dumps(args), project, str(gid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_qemu_user_may_only_fetch_taps_with_its_key(quiet_node: TapNode) -> None:
    os.chmod(quiet_node.folder, 0o755)
    quiet_node.start("--qemu-user", "65533")
    which = sandbox()
    network = quiet_node.attach(which)
    quiet_node.arm(which)
    good = {"sandbox": which, "key": network["fetch_key"]}
    assert ask_as(quiet_node, 65533, 0, "fetch", good)["fds"] == 1
    assert ask_as(quiet_node, 65533, 0, "fetch", {**good, "key": "f" * 64}) == {"kind": "permission"}
    for verb, args in (("attach", {}), ("release", {"sandbox": which}), ("list", {}), ("status", {})):
        assert ask_as(quiet_node, 65533, 0, verb, args) == {"kind": "permission"}
    turned_away = ask_as(quiet_node, 65532, 0, "fetch", good)  # the server may have hung up before it was asked
    assert turned_away in (
        {"kind": "permission"},
        {"errno": "BrokenPipeError"},
        {"errno": "ConnectionResetError"},
    )
    assert ask_as(quiet_node, 65532, 65532, "fetch", good) == {"errno": "PermissionError"}
    quiet_node.release(which)


def test_one_call_returns_the_traffic_counters_of_all_guests(tap_node: TapNode) -> None:
    first, second = sandbox(), sandbox()
    network = tap_node.attach(first)
    tap_node.attach(second)

    def received_and_sent() -> tuple[int, int]:
        answer = tap_node.call("counters", {"after": ""})
        assert answer["last"] == ""
        assert set(answer["sandboxes"]) == {first, second}
        numbers = answer["sandboxes"][first]["eth0"]
        return numbers[0], numbers[4]

    with tap_node.guest(first, network) as guest:
        guest.boot()
        before = received_and_sent()
        flood = bytes(1000)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _ in range(20):
                sock.sendto(flood, (network["ips"][0], 9))
        until(lambda: received_and_sent()[0] - before[0] > 20_000, what="the guest has received 20 datagrams")
        assert received_and_sent()[1] - before[1] < 10_000, "what the guest received is not what it sent"
    tap_node.release(first)
    assert set(tap_node.call("counters", {})["sandboxes"]) == {second}
    tap_node.release(second)
    assert tap_node.call("counters", {})["sandboxes"] == {}
