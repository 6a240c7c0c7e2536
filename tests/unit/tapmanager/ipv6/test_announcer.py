"""Router advertisements have the right content, and are sent at the right times."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from ipaddress import IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapmanager.ipv6 import discovery, frame, routers
from tapmanager.ipv6.announcer import Announcer, Ends
from tapmanager.ipv6.frame import STAND_IN_SERVER, Packet, stand_in_address, stand_in_mac
from tapmanager.network_values import OFF, WITH_IP, Dns
from tapmanager.pod import Neighbour, Nic, Route

MAC, GATEWAY_MAC, OTHER_MAC = (bytes.fromhex(one) for one in ("0a58c0a80002", "020000000011", "020000000012"))
GATEWAY, LINK_LOCAL = IPv6Address("fd00::1"), IPv6Address("fe80::858:c0ff:fea8:2")
STAND_IN_MAC = stand_in_mac(1)
STAND_IN, NOT_A_ROUTER = stand_in_address(1), stand_in_address(STAND_IN_SERVER)
DEFAULT = Route("::/0", str(GATEWAY))
NIC = Nic(
    link="eth0", mac="0a:58:c0:a8:00:02", link_mac="02:00:00:00:00:01", bridge="br0", bridge_mac="02:00:00:00:00:02", tap="tap0",
    mtu=1500, addresses=("10.88.0.5/16", "fd00::5/64"), routes=(Route("0.0.0.0/0", "10.88.0.1"), DEFAULT), link_addresses=(),
    link_routes=(), route_mtu=1450, filter=WITH_IP,
)  # fmt: skip
DNS = Dns(("10.96.0.10", "fd00::10", "fd00::11"), ("default.svc.cluster.local", "cluster.local"))


def options_of(area: bytes) -> list[tuple[int, bytes]]:
    found = []
    while area:
        found.append((area[0], area[2 : area[1] * 8]))
        area = area[area[1] * 8 :]
    return found


@dataclasses.dataclass(frozen=True)
class Heard:
    """A router advertisement."""

    source: IPv6Address
    target: IPv6Address
    flags: int
    lifetime: int
    options: list[tuple[int, bytes]]

    def all(self, kind: int) -> list[bytes]:
        return [body for found, body in self.options if found == kind]


def heard(data: bytes) -> Heard:
    packet = frame.parse(data)
    assert (packet.hop_limit, packet.payload[:2], packet.source_mac) == (255, b"\x86\0", bytes.fromhex("020000000002"))
    assert len(data) <= 14 + frame.LEAST_MTU
    flags, lifetime = struct.unpack_from("!xBH", packet.payload, 4)
    return Heard(packet.source, packet.target, flags, lifetime, options_of(packet.payload[16:]))


class Network:
    """A guest's tap, and a network behind it."""

    def __init__(self, nic: Nic = NIC, dns: Dns = DNS, known: tuple[IPv6Address, ...] = ()) -> None:
        self.now = 1000.0
        self.sent: list[bytes] = []
        self.asked: list[IPv6Address] = []
        self.stands_in: dict[IPv6Address, bytes] = {}
        self.works = True
        self._made_later: list[Callable[[], None]] = []
        announced = routers.announcement_for(nic, dns)
        assert announced is not None
        self.announced = announced
        self.announcer = Announcer(announced, Ends(self._send, self._ask, self._stand_in), known, self.now)
        self.announcer.tick(self.now)
        self.makes()

    def _send(self, data: bytes) -> None:
        self.sent.append(data)

    def _ask(self, data: bytes) -> None:
        packet = frame.parse(data)
        assert (packet.source_mac, packet.source, packet.payload[0]) == (MAC, IPv6Address("fd00::5"), 135)
        self.asked.append(IPv6Address(packet.payload[8:24]))

    def _stand_in(self, address: IPv6Address, mac: bytes, then: Callable[[bool], None]) -> None:
        def make() -> None:
            if self.works:
                self.stands_in[address] = mac
            then(self.works)

        self._made_later.append(make)

    def makes(self) -> int:
        """What it was asked for until now; how much that is."""
        begun, self._made_later = self._made_later, []
        for make in begun:
            make()
        return len(begun)

    def heard(self) -> list[Heard]:
        """All advertisements since the last time."""
        found, self.sent = self.sent, []
        return [heard(data) for data in found]

    def answers(self, mac: bytes = GATEWAY_MAC, gateway: IPv6Address = GATEWAY, *, is_slow: bool = False) -> None:
        """`is_slow`: nobody stands for it yet."""
        body = b"\x88\0\0\0\xe0\0\0\0" + gateway.packed + b"\2\1" + mac
        self.announcer.from_network(frame.build(Packet(mac, MAC, gateway, IPv6Address("fd00::5"), frame.ICMP, body)))
        if not is_slow:
            self.makes()

    def solicits(self, source: IPv6Address = LINK_LOCAL, mac: bytes = MAC) -> None:
        self.announcer.from_guest(solicitation(source, mac), self.now)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.announcer.tick(self.now)) <= until:
            assert due > self.now
            self.makes()
            self.now = due
        self.now = until


def solicitation(source: IPv6Address = LINK_LOCAL, mac: bytes = MAC, options: bytes = b"", **changes: object) -> bytes:
    group = IPv6Address("ff02::2")
    packet = Packet(mac, frame.group_mac(group), source, group, frame.ICMP, b"\x85\0\0\0" + bytes(4) + options)
    return frame.build(dataclasses.replace(packet, **changes))


def ready(nic: Nic = NIC, dns: Dns = DNS) -> Network:
    """The gateway has answered, and all of that is over."""
    network = Network(nic, dns)
    network.answers()
    network.heard()
    return network


# -- what is said --------------------------------------------------------------------------------------------------------


def test_an_interface_without_an_ipv6_address_gets_no_advertisement() -> None:
    assert routers.announcement_for(dataclasses.replace(NIC, addresses=("10.88.0.5/16",)), DNS) is None


def test_a_solicitation_is_answered_with_all_that_the_guest_needs() -> None:
    network = ready()
    network.solicits()
    (said,) = network.heard()
    assert (said.source, said.target, said.lifetime) == (STAND_IN, LINK_LOCAL, 65535)
    assert said.flags == 0xC0, "addresses and the rest by DHCPv6, preference medium"
    assert said.all(1) == [STAND_IN_MAC]
    assert said.all(5) == [struct.pack("!HI", 0, 1450)]
    seconds = struct.pack("!I", 65535)
    assert said.all(3) == [bytes([64, 0x80]) + seconds * 2 + bytes(4) + IPv6Address("fd00::").packed]
    assert said.all(25) == [b"\0\0" + seconds + IPv6Address("fd00::10").packed + IPv6Address("fd00::11").packed]
    (search,) = said.all(31)
    assert search[:6] == b"\0\0" + seconds
    assert search[6:].startswith(b"\x07default\x03svc\x07cluster\x05local\0\x07cluster\x05local\0")
    assert network.stands_in == {STAND_IN: GATEWAY_MAC}


def test_a_link_local_gateway_is_the_router_itself_without_a_stand_in() -> None:
    gateway = IPv6Address("fe80::1")
    network = Network(
        dataclasses.replace(NIC, addresses=("fd00::5/128",), routes=(Route("::/0", str(gateway)),), filter=OFF)
    )
    (said,) = network.heard()
    assert (said.source, said.target, said.lifetime) == (gateway, frame.ALL_NODES, 65535)
    assert said.all(1) == [], "the guest asks it for its MAC"
    assert said.all(3) == [], "a host's prefix is nobody else's"
    assert (network.asked, network.stands_in) == ([], {})


def test_a_gateway_is_advertised_with_the_mac_from_the_plugins_neighbour_entry() -> None:
    known = Neighbour("fe80::1", GATEWAY_MAC.hex(":"))
    network = Network(dataclasses.replace(NIC, routes=(Route("::/0", "fe80::1"),), neighbours=(known,)))
    assert [said.all(1) for said in network.heard()] == [[GATEWAY_MAC]]
    known = Neighbour(str(GATEWAY), GATEWAY_MAC.hex(":"))
    network = Network(dataclasses.replace(NIC, neighbours=(known,)))
    assert [(said.source, said.all(1)) for said in network.heard()] == [(STAND_IN, [STAND_IN_MAC])]
    assert (network.asked, network.stands_in) == ([], {STAND_IN: GATEWAY_MAC})


def test_routes_are_advertised_by_their_own_router() -> None:
    second = IPv6Address("fe80::2")
    routes = (Route("fd00:7::/48", str(second)), Route("fd00:8::5/128", str(GATEWAY)), Route("fd00:9::/64"), DEFAULT)
    network = ready(dataclasses.replace(NIC, routes=routes))
    network.solicits()
    said = {one.source: one for one in network.heard()}
    assert {source: one.lifetime for source, one in said.items()} == {second: 0, stand_in_address(2): 65535}
    assert [body[:2] + body[6:14] for body in said[second].all(24)] == [
        bytes([48, 0]) + IPv6Address("fd00:7::").packed[:8]
    ]
    assert [body[0] for body in said[stand_in_address(2)].all(24)] == [128]
    assert {body[14:30] for body in said[second].all(3)} == {
        IPv6Address("fd00::").packed,
        IPv6Address("fd00:9::").packed,
    }


def test_without_a_router_the_guest_still_learns_its_on_link_prefix() -> None:
    network = Network(dataclasses.replace(NIC, routes=()))
    (said,) = network.heard()
    assert (said.source, said.lifetime, said.flags) == (NOT_A_ROUTER, 0, 0xC0)
    assert len(said.all(3)) == 1


def test_options_that_do_not_fit_into_one_advertisement_continue_in_the_next() -> None:
    routes = tuple(Route(f"fd00:{number:x}::/64", str(GATEWAY)) for number in range(1, 200))
    network = ready(dataclasses.replace(NIC, routes=(*routes, DEFAULT)))
    network.solicits()
    said = network.heard()
    assert len(said) > 2
    assert {(one.source, one.lifetime, one.flags) for one in said} == {(STAND_IN, 65535, 0xC0)}
    assert sum(len(one.all(24)) for one in said) == 199


def test_a_long_search_list_is_cut_to_the_packet_size() -> None:
    network = ready(dns=Dns((), tuple(f"{'a' * 50}{number}.example" for number in range(40))))
    network.solicits()
    said = network.heard()
    assert [len(one.all(31)) for one in said].count(1) == 1


def test_an_mtu_too_small_for_ipv6_is_not_advertised() -> None:
    network = ready(dataclasses.replace(NIC, mtu=1200, route_mtu=0))
    network.solicits()
    assert [one.all(5) for one in network.heard()] == [[]]


def test_routes_that_cannot_be_advertised_are_logged() -> None:
    nowhere = routers.announcement_for(dataclasses.replace(NIC, routes=(Route("::/0"),)), DNS)
    assert nowhere is not None
    assert nowhere.left_out == ("::/0: it has no gateway",)
    many = tuple(Route(f"fd01::{number:x}/128", f"fd00::{number:x}") for number in range(1, 258))
    crowd = routers.announcement_for(dataclasses.replace(NIC, routes=many), DNS)
    assert crowd is not None
    assert crowd.left_out == ("fd01::100/128: too many gateways", "fd01::101/128: too many gateways")


# -- when it is said -----------------------------------------------------------------------------------------------------


def test_a_solicitation_before_the_gateway_is_found_is_answered_later() -> None:
    network = Network()
    assert (network.asked, network.heard()) == ([GATEWAY], [])
    network.solicits()
    assert network.heard() == []
    network.answers()
    assert [one.lifetime for one in network.heard()] == [65535]
    network.wait(10)
    assert network.heard() == []


def test_without_its_gateway_a_guest_has_an_address_and_later_gets_the_router() -> None:
    network = Network()
    network.solicits()
    network.wait(5)
    assert [(one.source, one.lifetime, one.flags) for one in network.heard()] == [(NOT_A_ROUTER, 0, 0xC0)]
    network.solicits()
    assert [(one.source, one.lifetime) for one in network.heard()] == [(NOT_A_ROUTER, 0)]
    network.wait(600)
    assert 10 < len(network.asked) < 25, "asked less and less often"
    network.heard()
    network.answers()
    assert [(one.source, one.lifetime) for one in network.heard()] == [(STAND_IN, 65535)]


def test_advertisements_are_repeated_and_a_changed_gateway_mac_is_noticed() -> None:
    network = ready()
    network.wait(3 * 600)
    assert [(one.source, one.target) for one in network.heard()] == [(STAND_IN, frame.ALL_NODES)] * 3
    assert len(network.asked) >= 4
    network.answers(OTHER_MAC)
    assert network.stands_in == {STAND_IN: OTHER_MAC}
    assert network.heard() == [], "for the guest nothing has changed"


def test_a_router_is_advertised_only_once_its_stand_in_exists() -> None:
    network = Network()
    network.solicits()
    network.answers(is_slow=True)
    assert network.heard() == []
    assert network.makes() == 1
    assert [one.lifetime for one in network.heard()] == [65535]


def test_only_the_last_gateway_mac_heard_during_a_set_up_is_set_up_next() -> None:
    network = Network()
    for mac in (GATEWAY_MAC, OTHER_MAC, STAND_IN_MAC, OTHER_MAC):
        network.answers(mac, is_slow=True)
    assert (network.makes(), network.stands_in) == (1, {STAND_IN: GATEWAY_MAC})
    assert (network.makes(), network.stands_in) == (1, {STAND_IN: OTHER_MAC})
    assert network.makes() == 0
    assert len(network.heard()) == 1


def test_after_a_restart_an_existing_stand_in_is_a_router_at_once() -> None:
    network = Network(known=(STAND_IN,))
    assert [(one.source, one.lifetime, one.all(1)) for one in network.heard()] == [(STAND_IN, 65535, [STAND_IN_MAC])]
    network.answers()
    assert network.stands_in == {STAND_IN: GATEWAY_MAC}, "it may have another by now"


def test_without_a_stand_in_on_the_bridge_there_is_no_router() -> None:
    network = Network()
    network.works = False
    network.answers()
    network.wait(5)
    network.solicits()
    assert [one.lifetime for one in network.heard()] == [0]
    network.works = True
    network.answers()
    assert [one.lifetime for one in network.heard()] == [65535]


def test_a_guest_without_an_address_is_answered_at_the_all_nodes_address() -> None:
    network = ready()
    network.solicits(frame.NOBODY)
    assert [one.target for one in network.heard()] == [frame.ALL_NODES]


def test_solicitations_cause_at_most_one_packet_per_second_on_the_network() -> None:
    network = Network()
    for _ in range(100):
        network.solicits()
    assert len(network.asked) == 1


UNSOUND = {
    "from another card": solicitation(mac=OTHER_MAC),
    "through a router": solicitation(hop_limit=254),
    "with a code": solicitation(payload=b"\x85\1\0\0" + bytes(4)),
    "cut short": solicitation(payload=b"\x85\0\0\0\0\0\0"),
    "an advertisement": solicitation(payload=b"\x86\0\0\0" + bytes(12)),
    "an option of no length": solicitation(options=b"\1\0" + bytes(6)),
    "an option longer than it": solicitation(options=b"\1\2" + bytes(6)),
    "half an option": solicitation(options=b"\1"),
    "nobody's, with a MAC": solicitation(frame.NOBODY, options=b"\1\1" + MAC),
    "a wrong checksum": solicitation()[:56] + b"\xba\xad" + solicitation()[58:],
    "UDP": solicitation(protocol=frame.UDP),
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("data", UNSOUND.values(), ids=UNSOUND)
def test_malformed_solicitations_get_no_answer(data: bytes) -> None:
    network = ready()
    network.announcer.from_guest(data, network.now)
    assert network.sent == []


@pytest.mark.parametrize("mac", [bytes(6), b"\xff" * 6, b"\1\0\0\0\0\1"])
def test_a_multicast_mac_is_not_taken_for_a_gateway(mac: bytes) -> None:
    network = Network()
    network.answers(mac)
    assert network.stands_in == {}


def test_another_neighbours_answer_changes_nothing() -> None:
    network = Network()
    network.answers(gateway=IPv6Address("fd00::2"))
    assert (network.stands_in, network.sent) == ({}, [])


@given(data=st.binary(max_size=300), at=st.integers(0, 90), noise=st.binary(max_size=30))
def test_no_frame_makes_it_fail(data: bytes, at: int, noise: bytes) -> None:
    network = ready()
    good = solicitation(options=b"\1\1" + MAC)
    for one in (data, good[:at] + noise + good[at + len(noise) :], good[:54] + data):
        network.announcer.from_guest(one, network.now)
        network.announcer.from_network(one)


@given(
    networks=st.lists(st.integers(0, 2**128 - 1).flatmap(lambda n: st.integers(1, 128).map(
        lambda p: IPv6Network((n, p), strict=False))), max_size=60),
    domains=st.lists(st.text("abc.", max_size=80), max_size=40),
    mtu=st.integers(68, 65535),
)  # fmt: skip
def test_any_configuration_gives_valid_packets(networks: list[IPv6Network], domains: list[str], mtu: int) -> None:
    routes = (*(Route(str(one), str(GATEWAY)) for one in networks), DEFAULT)
    nic = dataclasses.replace(NIC, routes=routes, mtu=mtu, route_mtu=0)
    network = ready(nic, Dns(("fd00::10",), tuple(domains)))
    network.solicits()
    assert sum(len(one.all(24)) for one in network.heard()) == len(networks)


def test_our_solicitation_goes_to_the_solicited_node_group_of_its_target() -> None:
    packet = frame.parse(discovery.solicitation(GATEWAY, IPv6Address("fd00::5"), MAC))
    assert packet.target == IPv6Address("ff02::1:ff00:1")
    assert packet.target_mac == b"\x33\x33\xff\0\0\1"
    assert packet.payload[24:] == b"\1\1" + MAC
