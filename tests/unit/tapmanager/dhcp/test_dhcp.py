"""DHCP messages survive round trips and fuzzing, and the answers are those of RFC 2131."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import struct
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapmanager.dhcp import lease_plan, packet
from tapmanager.dhcp.lease_plan import Lease
from tapmanager.dhcp.packet import (
    BROADCAST_IP,
    BROADCAST_MAC,
    CLIENT_PORT,
    BadPacket,
    Datagram,
    Message,
    build_frame,
    parse_frame,
)
from tapmanager.network_values import Dns
from tapmanager.pod import Nic, Route

MAC = bytes.fromhex("0a58c0a80002")
OTHER_MAC = bytes.fromhex("0a58c0a80003")
GATEWAY = IPv4Address("10.88.0.1")
ADDRESS = IPv4Address("10.88.0.5")

NIC = Nic(
    link="eth0",
    mac="0a:58:c0:a8:00:02",
    link_mac="02:00:00:00:00:01",
    bridge="br0",
    bridge_mac="02:00:00:00:00:02",
    tap="tap0",
    mtu=1450,
    addresses=("10.88.0.5/16", "fd00::5/64"),
    routes=(Route("10.200.0.0/16", "10.88.0.9"), Route("0.0.0.0/0", str(GATEWAY)), Route("::/0", "fd00::1")),
    link_addresses=("10.88.0.5/16",),
    link_routes=(),
)
DNS = Dns(("10.96.0.10", "fd00::10"), ("default.svc.cluster.local", "cluster.local"), ("ndots:5",))


def lease(nic: Nic = NIC, dns: Dns = DNS, name: str = "web-0") -> Lease:
    found = lease_plan.lease_for(nic, dns, name)
    assert found is not None
    return found


def request(kind: int, **more: object) -> Message:
    options = {packet.OPT_TYPE: bytes([kind]), **more.pop("options", {})}
    return Message(packet.BOOTREQUEST, 0x1234, MAC, options=options, **more)


def in_frame(message: Message, port: int = 67) -> bytes:
    source = Datagram(MAC, BROADCAST_MAC, packet.ANY, BROADCAST_IP, CLIENT_PORT, port, packet.build(message))
    return build_frame(source)


def answered(message: Message, to: Lease | None = None) -> tuple[Datagram, Message]:
    data = lease_plan.answer(in_frame(message), to or lease())
    assert data is not None
    datagram = parse_frame(data)
    return datagram, packet.parse(datagram.payload)


# -- bytes ---------------------------------------------------------------------------------------------------------------

_ADDRESSES = st.integers(0, 2**32 - 1).map(IPv4Address)
_OPTIONS = st.dictionaries(
    st.integers(1, 254).filter(lambda code: code != packet.OPT_OVERLOAD), st.binary(max_size=600), max_size=6
)


@given(
    message=st.builds(
        Message,
        op=st.integers(0, 255),
        xid=st.integers(0, 2**32 - 1),
        chaddr=st.binary(min_size=6, max_size=6),
        flags=st.integers(0, 65535),
        secs=st.integers(0, 65535),
        hops=st.integers(0, 255),
        ciaddr=_ADDRESSES,
        yiaddr=_ADDRESSES,
        siaddr=_ADDRESSES,
        giaddr=_ADDRESSES,
        options=_OPTIONS,
    )
)
def test_a_message_is_parsed_as_it_was_built(message: Message) -> None:
    assert packet.parse(packet.build(message)) == message


@given(
    datagram=st.builds(
        Datagram,
        source_mac=st.binary(min_size=6, max_size=6),
        target_mac=st.binary(min_size=6, max_size=6),
        source=_ADDRESSES,
        target=_ADDRESSES,
        source_port=st.integers(0, 65535),
        target_port=st.integers(0, 65535),
        payload=st.binary(max_size=1400),
    ),
    padding=st.binary(max_size=20),
)
def test_a_datagram_is_parsed_as_it_was_built_with_any_padding(datagram: Datagram, padding: bytes) -> None:
    assert parse_frame(build_frame(datagram) + padding) == datagram


@given(data=st.binary(max_size=700))
def test_any_bytes_are_a_message_or_a_bad_packet(data: bytes) -> None:
    for parse in (packet.parse, parse_frame):
        with contextlib.suppress(BadPacket):
            parse(data)


@given(area=st.binary(max_size=300), at=st.integers(0, 600), noise=st.binary(max_size=40))
def test_no_frame_makes_the_server_fail(area: bytes, at: int, noise: bytes) -> None:
    fixed = packet.build(request(packet.DISCOVER))[:240]
    data = build_frame(Datagram(MAC, BROADCAST_MAC, packet.ANY, BROADCAST_IP, 68, 67, fixed + area))
    lease_plan.answer(data, lease())
    lease_plan.answer(data[:at] + noise + data[at + len(noise) :], lease())


def checksum_is_right(data: bytes) -> bool:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total == 0xFFFF


@given(payload=st.binary(max_size=301))
def test_both_checksums_are_right(payload: bytes) -> None:
    data = build_frame(Datagram(MAC, OTHER_MAC, GATEWAY, ADDRESS, 67, 68, payload))
    ip, udp = data[14:34], data[34:]
    assert checksum_is_right(ip)
    pseudo = ip[12:20] + struct.pack("!BBH", 0, 17, len(udp))
    assert checksum_is_right(pseudo + udp + b"\0" * (len(udp) % 2))


def test_overloaded_options_continue_in_the_file_and_sname_fields() -> None:
    data = bytearray(packet.build(Message(1, 1, MAC, options={packet.OPT_OVERLOAD: b"\3", 53: b"\1"})))
    data[108:116] = bytes([12, 2]) + b"ab" + bytes([255, 0, 0, 0])
    data[44:52] = bytes([12, 2]) + b"cd" + bytes([255, 0, 0, 0])
    assert packet.parse(bytes(data)).options == {53: b"\1", 12: b"abcd"}


def test_fragments_and_other_protocols_are_no_datagrams() -> None:
    good = in_frame(request(packet.DISCOVER))
    for offset, value in ((20, b"\x20\x00"), (20, b"\x00\x01"), (23, b"\x06"), (12, b"\x86\xdd")):
        with pytest.raises(BadPacket):
            parse_frame(good[:offset] + value + good[offset + len(value) :])


# -- option contents -----------------------------------------------------------------------------------------------------


def test_the_search_list_is_encoded_as_rfc_3397_says() -> None:
    assert packet.encode_search(("eng.apple.com.", "marketing.apple.com")) == (
        b"\x03eng\x05apple\x03com\x00\x09marketing\x05apple\x03com\x00"
    )


def test_names_that_dns_does_not_allow_are_left_out_of_the_search_list() -> None:
    assert packet.encode_search(
        ("a" * 64 + ".com", "a..b", "", ".", "b\u00fccher.de", "ok", ".".join(["a" * 60] * 5))
    ) == (b"\x02ok\x00")


def test_classless_routes_are_encoded_as_rfc_3442_says() -> None:
    routes = [
        (IPv4Network("10.17.0.0/16"), IPv4Address("10.0.0.1")),
        (IPv4Network("10.27.129.0/24"), packet.ANY),
        (IPv4Network("0.0.0.0/0"), IPv4Address("10.0.0.9")),
        (IPv4Network("10.198.122.47/32"), packet.ANY),
    ]
    assert packet.encode_routes(routes) == bytes(
        [16, 10, 17, 10, 0, 0, 1, 24, 10, 27, 129, 0, 0, 0, 0, 0, 10, 0, 0, 9, 32, 10, 198, 122, 47, 0, 0, 0, 0]
    )


def test_an_offer_has_everything_that_the_guest_needs() -> None:
    _, offer = answered(request(packet.DISCOVER))
    assert offer.kind == packet.OFFER
    assert offer.yiaddr == ADDRESS
    assert {code: value for code, value in offer.options.items() if code not in (53, 119, 121)} == {
        packet.OPT_MASK: bytes([255, 255, 0, 0]),
        packet.OPT_ROUTER: GATEWAY.packed,
        packet.OPT_DNS: IPv4Address("10.96.0.10").packed,
        packet.OPT_HOSTNAME: b"web-0",
        packet.OPT_DOMAIN: b"default.svc.cluster.local",
        packet.OPT_MTU: (1450).to_bytes(2, "big"),
        packet.OPT_BROADCAST: IPv4Address("10.88.255.255").packed,
        packet.OPT_LEASE_TIME: (86400).to_bytes(4, "big"),
        packet.OPT_T1: (43200).to_bytes(4, "big"),
        packet.OPT_T2: (75600).to_bytes(4, "big"),
        packet.OPT_SERVER_ID: GATEWAY.packed,
    }
    assert offer.options[packet.OPT_SEARCH] == packet.encode_search(DNS.searches)
    assert offer.options[packet.OPT_CLASSLESS_ROUTES] == bytes([16, 10, 200, 10, 88, 0, 9, 0, 10, 88, 0, 1])


def test_without_a_gateway_the_server_is_link_local_and_there_is_no_router() -> None:
    _, offer = answered(request(packet.DISCOVER), lease(dataclasses.replace(NIC, routes=())))
    server = offer.address(packet.OPT_SERVER_ID)
    assert server is not None
    assert server.is_link_local
    assert packet.OPT_ROUTER not in offer.options
    assert packet.OPT_CLASSLESS_ROUTES not in offer.options


def test_an_interface_without_ipv4_has_no_lease() -> None:
    assert lease_plan.lease_for(dataclasses.replace(NIC, addresses=("fd00::5/64",)), DNS, "x") is None


@pytest.mark.parametrize(
    ("pod", "hostname"),
    [("web-0", "web-0"), ("a" * 70, "a" * 63), ("a.b", "a.b"), ("a" * 62 + "-b", "a" * 62), ("x_y", ""), ("..", "")],
)
def test_the_hostname_is_the_pods_name_if_dns_allows_it(pod: str, hostname: str) -> None:
    assert lease_plan.hostname_of(pod) == hostname


def test_options_beyond_the_clients_size_limit_are_left_out_unrequested_ones_first() -> None:
    many = Dns(DNS.servers, tuple(f"{'x' * 60}{number}.example.org" for number in range(8)))
    asked = bytes([packet.OPT_MASK, packet.OPT_ROUTER, packet.OPT_DNS])
    _, offer = answered(request(packet.DISCOVER, options={packet.OPT_PARAMETERS: asked}), lease(dns=many))
    assert packet.OPT_SEARCH not in offer.options
    assert {packet.OPT_MASK, packet.OPT_ROUTER, packet.OPT_DNS} <= set(offer.options)
    assert len(packet.build(offer)) <= 548
    wide = request(packet.DISCOVER, options={packet.OPT_MAX_SIZE: (1500).to_bytes(2, "big")})
    _, offer = answered(wide, lease(dns=many))
    assert offer.options[packet.OPT_SEARCH] == packet.encode_search(many.searches)


# -- who gets an answer, and where it goes -------------------------------------------------------------------------------


def selecting(**more: bytes) -> Message:
    return request(
        packet.REQUEST,
        options={packet.OPT_SERVER_ID: GATEWAY.packed, packet.OPT_REQUESTED_IP: ADDRESS.packed},
        **more,
    )


def test_a_request_for_the_offer_is_acknowledged() -> None:
    datagram, ack = answered(selecting())
    assert ack.kind == packet.ACK
    assert ack.yiaddr == ADDRESS
    assert (datagram.target_mac, datagram.target, datagram.target_port) == (MAC, ADDRESS, 68)
    assert (datagram.source, datagram.source_port) == (GATEWAY, 67)


def test_a_client_that_cannot_take_unicast_yet_is_answered_by_broadcast() -> None:
    datagram, _ = answered(request(packet.DISCOVER, flags=packet.BROADCAST_FLAG))
    assert (datagram.target_mac, datagram.target) == (BROADCAST_MAC, BROADCAST_IP)


def test_a_request_for_another_servers_offer_is_ignored() -> None:
    other = request(
        packet.REQUEST, options={packet.OPT_SERVER_ID: bytes([10, 88, 0, 77]), packet.OPT_REQUESTED_IP: ADDRESS.packed}
    )
    assert lease_plan.answer(in_frame(other), lease()) is None


def test_a_renewal_is_acknowledged_at_the_clients_address() -> None:
    datagram, ack = answered(request(packet.REQUEST, ciaddr=ADDRESS))
    assert ack.kind == packet.ACK
    assert ack.ciaddr == ack.yiaddr == ADDRESS
    assert (datagram.target_mac, datagram.target) == (MAC, ADDRESS)


def test_a_reboot_with_the_right_address_is_acknowledged() -> None:
    _, ack = answered(request(packet.REQUEST, options={packet.OPT_REQUESTED_IP: ADDRESS.packed}))
    assert ack.kind == packet.ACK


@pytest.mark.parametrize(
    "message",
    [
        request(packet.REQUEST, options={packet.OPT_REQUESTED_IP: bytes([10, 88, 0, 99])}),
        request(packet.REQUEST, ciaddr=IPv4Address("192.168.1.7")),
        request(
            packet.REQUEST,
            options={packet.OPT_SERVER_ID: GATEWAY.packed, packet.OPT_REQUESTED_IP: bytes(4)[:3] + b"\1"},
        ),
    ],
    ids=["init-reboot", "renewing", "selecting"],
)
def test_a_wrong_address_is_refused_by_broadcast(message: Message) -> None:
    datagram, nak = answered(message)
    assert nak.kind == packet.NAK
    assert nak.yiaddr == packet.ANY
    assert packet.OPT_LEASE_TIME not in nak.options
    assert (datagram.target_mac, datagram.target) == (BROADCAST_MAC, BROADCAST_IP)


def test_inform_gets_configuration_without_an_address_or_a_lease() -> None:
    datagram, ack = answered(request(packet.INFORM, ciaddr=ADDRESS))
    assert ack.kind == packet.ACK
    assert ack.yiaddr == packet.ANY
    assert packet.OPT_LEASE_TIME not in ack.options
    assert ack.options[packet.OPT_DNS] == IPv4Address("10.96.0.10").packed
    assert datagram.target == ADDRESS


def test_the_client_identifier_is_returned() -> None:
    _, offer = answered(request(packet.DISCOVER, options={packet.OPT_CLIENT_ID: b"\xff\1\2"}))
    assert offer.options[packet.OPT_CLIENT_ID] == b"\xff\1\2"


@pytest.mark.parametrize(
    "message",
    [
        dataclasses.replace(request(packet.DISCOVER), chaddr=OTHER_MAC),
        request(packet.DISCOVER, giaddr=GATEWAY),
        dataclasses.replace(request(packet.DISCOVER), op=packet.BOOTREPLY),
        request(packet.RELEASE, ciaddr=ADDRESS),
        request(packet.DECLINE),
        request(packet.OFFER),
        request(packet.INFORM),
        request(packet.REQUEST),
        Message(packet.BOOTREQUEST, 1, MAC),
    ],
    ids=["other mac", "relayed", "reply", "release", "decline", "offer", "inform 0", "request 0", "bootp"],
)
def test_messages_for_other_servers_get_no_answer(message: Message) -> None:
    assert lease_plan.answer(in_frame(message), lease()) is None


def test_only_the_servers_port_is_answered() -> None:
    assert lease_plan.answer(in_frame(request(packet.DISCOVER), port=68), lease()) is None


def test_a_host_address_has_no_broadcast_address() -> None:
    nic = dataclasses.replace(
        NIC, addresses=("10.88.0.5/32",), routes=(Route("169.254.1.1/32"), Route("0.0.0.0/0", "169.254.1.1"))
    )
    _, offer = answered(request(packet.DISCOVER), lease(nic))
    assert offer.options[packet.OPT_MASK] == b"\xff" * 4
    assert packet.OPT_BROADCAST not in offer.options
    assert offer.options[packet.OPT_CLASSLESS_ROUTES] == bytes([32, 169, 254, 1, 1, 0, 0, 0, 0, 0, 169, 254, 1, 1])
    assert lease(nic).interface == ipaddress.IPv4Interface("10.88.0.5/32")
