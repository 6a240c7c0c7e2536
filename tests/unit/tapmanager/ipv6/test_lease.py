"""DHCPv6 messages survive fuzzing, and the answers are those of RFC 8415."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from ipaddress import IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapmanager.dhcp.packet import BadPacket, encode_search
from tapmanager.ipv6 import frame, lease
from tapmanager.ipv6.frame import Packet
from tapmanager.ipv6.lease import (
    ADVERTISE,
    CONFIRM,
    DECLINE,
    HEADS,
    INFORMATION_REQUEST,
    OPT_CLIENT_ID,
    OPT_DNS,
    OPT_ELAPSED,
    OPT_IA_ADDRESS,
    OPT_IA_NA,
    OPT_IA_PD,
    OPT_IA_TA,
    OPT_PREFERENCE,
    OPT_RAPID_COMMIT,
    OPT_REFRESH,
    OPT_SEARCH,
    OPT_SERVER_ID,
    OPT_STATUS,
    REBIND,
    RECONFIGURE,
    RELEASE,
    RENEW,
    REPLY,
    REQUEST,
    SOLICIT,
    STATUS_NO_ADDRESSES,
    STATUS_NO_BINDING,
    STATUS_NO_PREFIXES,
    STATUS_NOT_ON_LINK,
    STATUS_SUCCESS,
    Lease,
    Message,
    Option,
    address_option,
    build_message,
    encode_options,
    parse_message,
    parse_options,
)
from tapmanager.network_values import Dns
from tapmanager.pod import Nic

MAC = bytes.fromhex("0a58c0a80002")
OWN, SECOND, FOREIGN = IPv6Address("fd00::5"), IPv6Address("fd00:1::5"), IPv6Address("fd00::bad")
CLIENT, SERVER = b"\0\1\0\1rest of a DUID", lease.SERVER_ID
LINK_LOCAL = IPv6Address("fe80::858:c0ff:fea8:2")
IAID, OTHER_IAID = b"\0\0\0\1", b"\0\0\0\2"
DAY = 86400

NIC = Nic(
    link="eth0", mac="0a:58:c0:a8:00:02", link_mac="02:00:00:00:00:01", bridge="br0", bridge_mac="02:00:00:00:00:02", tap="tap0",
    mtu=1450, addresses=("10.88.0.5/16", "fd00::5/64", "fd00:1::5/128"), routes=(), link_addresses=(), link_routes=(),
)  # fmt: skip
DNS = Dns(("10.96.0.10", "fd00::10"), ("default.svc.cluster.local", "cluster.local"), ("ndots:5",))


def made(nic: Nic = NIC, dns: Dns = DNS) -> Lease:
    found = lease.lease_for(nic, dns)
    assert found is not None
    return found


def ia(*addresses: IPv6Address, iaid: bytes = IAID, kind: int = OPT_IA_NA) -> Option:
    inner = encode_options([address_option(one, 3600) for one in addresses])
    return kind, iaid + (b"" if kind == OPT_IA_TA else bytes(8)) + inner


def asking(kind: int, *options: Option, client: bytes | None = CLIENT, server: bytes | None = None) -> bytes:
    head = [] if client is None else [(OPT_CLIENT_ID, client)]
    head += [] if server is None else [(OPT_SERVER_ID, server)]
    return build_message(kind, b"\1\2\3", [*head, *options])


def in_frame(
    body: bytes, *, source: IPv6Address = LINK_LOCAL, target: IPv6Address = frame.DHCP_SERVERS, port: int = 547
) -> bytes:
    return frame.build(Packet(MAC, frame.group_mac(target), source, target, frame.UDP, frame.udp(546, port, body), 1))


def answered(body: bytes, to: Lease | None = None) -> Message:
    data = lease.answer(in_frame(body), to or made())
    assert data is not None
    packet = frame.parse(data)
    assert (packet.source_mac, packet.target_mac) == (bytes.fromhex("020000000002"), MAC)
    assert (packet.source.is_link_local, packet.target) == (True, LINK_LOCAL)
    port, payload = frame.from_udp(packet.payload)
    assert (port, payload[1:4]) == (546, b"\1\2\3")
    return parse_message(payload)


def is_unanswered(body: bytes, **where: object) -> bool:
    return lease.answer(in_frame(body, **where), made()) is None


def statuses(answer: Message) -> list[int]:
    """The answer's own, then those of its associations."""
    own = [answer.get(OPT_STATUS)] if answer.get(OPT_STATUS) else []
    inner = [dict(parse_options(value[head:])).get(OPT_STATUS)
             for code, value in answer.options if (head := HEADS.get(code))]  # fmt: skip
    return [int.from_bytes(one[:2], "big") for one in [*own, *inner] if one]


def lifetimes(answer: Message) -> dict[str, int]:
    """Of each address, preferred and valid alike."""
    found = {}
    for code, value in answer.options:
        if code == OPT_IA_NA:
            for inner, body in parse_options(value[12:]):
                if inner == OPT_IA_ADDRESS:
                    preferred, valid = struct.unpack_from("!II", body, 16)
                    assert preferred == valid
                    found[str(IPv6Address(body[:16]))] = valid
    return found


# -- bytes ---------------------------------------------------------------------------------------------------------------

_OPTIONS = st.lists(st.tuples(st.integers(0, 65535), st.binary(max_size=60)), max_size=8)


@given(data=st.binary(max_size=700))
def test_any_bytes_are_a_packet_and_a_message_or_bad(data: bytes) -> None:
    for parse in (frame.parse, parse_message, lambda raw: frame.from_udp(raw.ljust(8, b"\0"))):
        with contextlib.suppress(BadPacket):
            parse(data)


@given(
    kind=st.integers(0, 255),
    options=_OPTIONS,
    at=st.integers(0, 400),
    noise=st.binary(max_size=40),
    cut=st.integers(0, 600),
)
def test_no_frame_makes_the_server_fail(kind: int, options: list[Option], at: int, noise: bytes, cut: int) -> None:
    data = in_frame(build_message(kind, b"abc", [(OPT_CLIENT_ID, CLIENT), ia(OWN), *options]))
    for one in (data, data[:at] + noise + data[at + len(noise) :], data[:cut]):
        answer = lease.answer(one, made())
        assert answer is None or len(answer) <= 14 + frame.LEAST_MTU


@given(payload=st.binary(max_size=300), protocol=st.sampled_from([frame.UDP, frame.ICMP]))
def test_a_packet_is_parsed_as_it_was_built_with_any_padding(payload: bytes, protocol: int) -> None:
    packet = Packet(MAC, MAC, OWN, SECOND, protocol, payload.ljust(8, b"\0"))
    found = frame.parse(frame.build(packet) + b"padding")
    at = frame.CHECKSUM_AT[protocol]
    bare = found.payload[:at] + packet.payload[at : at + 2] + found.payload[at + 2 :]
    assert dataclasses.replace(found, payload=bare) == packet


def test_a_message_cut_anywhere_gets_no_answer() -> None:
    whole = in_frame(asking(SOLICIT, ia()))
    assert lease.answer(whole, made()) is not None
    assert [size for size in range(len(whole)) if lease.answer(whole[:size], made()) is not None] == []


# -- what is told --------------------------------------------------------------------------------------------------------


def test_an_interface_without_an_ipv6_address_has_no_lease() -> None:
    assert lease.lease_for(dataclasses.replace(NIC, addresses=("10.88.0.5/16",)), DNS) is None


def test_a_solicit_gets_the_plugins_addresses_with_the_highest_preference() -> None:
    answer = answered(asking(SOLICIT, ia(), (OPT_ELAPSED, b"\0\0")))
    assert (answer.kind, answer.get(OPT_CLIENT_ID), answer.get(OPT_SERVER_ID)) == (
        ADVERTISE,
        CLIENT,
        SERVER,
    )
    assert answer.get(OPT_PREFERENCE) == b"\xff"
    assert lifetimes(answer) == {str(OWN): DAY, str(SECOND): DAY}
    assert answer.get(OPT_DNS) == IPv6Address("fd00::10").packed
    assert answer.get(OPT_SEARCH) == encode_search(("default.svc.cluster.local", "cluster.local"))
    times = struct.unpack_from("!II", answer.get(OPT_IA_NA) or b"", 4)
    assert times == (DAY // 2, DAY * 7 // 8)


def test_a_client_that_asks_for_rapid_commit_has_its_addresses_at_once() -> None:
    answer = answered(asking(SOLICIT, (OPT_RAPID_COMMIT, b""), ia()))
    assert (answer.kind, answer.get(OPT_RAPID_COMMIT)) == (REPLY, b"")
    assert lifetimes(answer) == {str(OWN): DAY, str(SECOND): DAY}


def test_only_the_first_association_gets_addresses_and_others_no_addrs_avail() -> None:
    wanted = [ia(kind=OPT_IA_TA), ia(kind=OPT_IA_PD), ia(), ia(iaid=OTHER_IAID)]
    answer = answered(asking(SOLICIT, *wanted))
    assert [one.iaid for one in answer.associations if one.addresses] == [IAID]
    assert statuses(answer) == [STATUS_NO_ADDRESSES, STATUS_NO_PREFIXES, STATUS_NO_ADDRESSES]
    assert len(answer.associations) == 4


@pytest.mark.parametrize("had", [(), (OWN,), (OWN, SECOND)], ids=["nothing", "one", "both"])
def test_a_request_to_us_is_granted(had: tuple[IPv6Address, ...]) -> None:
    answer = answered(asking(REQUEST, ia(*had), server=SERVER))
    assert (answer.kind, lifetimes(answer), statuses(answer)) == (REPLY, {str(OWN): DAY, str(SECOND): DAY}, [])


def test_a_request_for_another_address_gets_not_on_link() -> None:
    answer = answered(asking(REQUEST, ia(FOREIGN), server=SERVER))
    assert (statuses(answer), lifetimes(answer)) == ([STATUS_NOT_ON_LINK], {})


@pytest.mark.parametrize("kind", [RENEW, REBIND])
def test_a_renewal_keeps_the_plugins_addresses_and_revokes_others(kind: int) -> None:
    server = SERVER if kind == RENEW else None
    answer = answered(asking(kind, ia(OWN, FOREIGN), server=server))
    assert (answer.kind, lifetimes(answer)) == (REPLY, {str(OWN): DAY, str(SECOND): DAY, str(FOREIGN): 0})


@pytest.mark.parametrize(
    ("had", "said"), [(OWN, STATUS_SUCCESS), (SECOND, STATUS_SUCCESS), (FOREIGN, STATUS_NOT_ON_LINK)]
)
def test_a_returning_client_learns_whether_its_address_is_still_valid(had: IPv6Address, said: int) -> None:
    answer = answered(asking(CONFIRM, ia(had)))
    assert (answer.kind, statuses(answer), answer.associations) == (REPLY, [said], ())


@pytest.mark.parametrize("kind", [RELEASE, DECLINE])
def test_a_release_is_confirmed_and_the_address_can_be_leased_again(kind: int) -> None:
    assert statuses(answered(asking(kind, ia(OWN), server=SERVER))) == [STATUS_SUCCESS]
    assert statuses(answered(asking(kind, ia(FOREIGN), server=SERVER))) == [STATUS_SUCCESS, STATUS_NO_BINDING]
    assert str(OWN) in lifetimes(answered(asking(SOLICIT, ia())))


@pytest.mark.parametrize("client", [CLIENT, None], ids=["with its name", "without"])
def test_an_information_request_is_answered_without_addresses(client: bytes | None) -> None:
    answer = answered(asking(INFORMATION_REQUEST, client=client))
    assert (answer.kind, answer.associations, answer.get(OPT_CLIENT_ID)) == (REPLY, (), client)
    assert answer.get(OPT_DNS) == IPv6Address("fd00::10").packed
    assert answer.get(OPT_REFRESH) == DAY.to_bytes(4, "big")


def test_a_long_search_list_is_cut_to_what_fits_after_the_servers() -> None:
    many = Dns(("fd00::10",), tuple(f"{'a' * 50}{number}.example" for number in range(40)))
    answer = answered(asking(SOLICIT, ia()), made(dns=many))
    found = answer.get(OPT_SEARCH) or b""
    assert encode_search(many.searches).startswith(found)
    assert len(found) > 500
    assert answer.get(OPT_DNS) == IPv6Address("fd00::10").packed


# -- who gets no answer --------------------------------------------------------------------------------------------------

SOLICITED = asking(SOLICIT, ia())
OTHER_SERVER = b"\0\3\0\1\2\2\2\2\2\2"
UNANSWERED = {
    "a solicitation without a client": asking(SOLICIT, ia(), client=None),
    "a solicitation to a server": asking(SOLICIT, ia(), server=SERVER),
    "a request to nobody": asking(REQUEST, ia(OWN)),
    "a request to another server": asking(REQUEST, ia(OWN), server=OTHER_SERVER),
    "a request without a client": asking(REQUEST, ia(OWN), client=None, server=SERVER),
    "a renewal at nobody": asking(RENEW, ia(OWN)),
    "a renewal at another server": asking(RENEW, ia(OWN), server=OTHER_SERVER),
    "a rebinding to us by name": asking(REBIND, ia(OWN), server=SERVER),
    "a confirmation to us by name": asking(CONFIRM, ia(OWN), server=SERVER),
    "a confirmation of nothing": asking(CONFIRM, ia()),
    "a release at another server": asking(RELEASE, ia(OWN), server=OTHER_SERVER),
    "a decline at nobody": asking(DECLINE, ia(OWN)),
    "information from another server": asking(INFORMATION_REQUEST, server=OTHER_SERVER),
    "information with an address": asking(INFORMATION_REQUEST, ia()),
    "an advertisement": asking(ADVERTISE, ia(), server=SERVER),
    "a reply": asking(REPLY, ia(), server=SERVER),
    "a reconfiguration": asking(RECONFIGURE, server=SERVER),
    "a relayed message": b"\x0c\0" + bytes(32) + b"\0\x09" + struct.pack("!H", len(SOLICITED)) + SOLICITED,
    "a relay's answer": b"\x0d\0" + bytes(32),
    "a message of no kind": asking(0, ia()),
    "a message of a kind to come": asking(36, ia()),
    "two clients": asking(SOLICIT, ia(), (OPT_CLIENT_ID, CLIENT)),
    "two servers": asking(REQUEST, ia(OWN), (OPT_SERVER_ID, SERVER), server=SERVER),
    "two times": asking(SOLICIT, ia(), *[(OPT_ELAPSED, b"\0\0")] * 2),
    "a client of two bytes": asking(SOLICIT, ia(), client=b"\0\1"),
    "a client of 131 bytes": asking(SOLICIT, ia(), client=b"x" * 131),
    "an association cut short": asking(SOLICIT, (OPT_IA_NA, b"\0\0\0\1")),
    "an address cut short": asking(SOLICIT, (OPT_IA_NA, bytes(12) + encode_options([(5, bytes(23))]))),
    "an option in an association cut short": asking(SOLICIT, (OPT_IA_NA, bytes(12) + b"\0\5\0\x18")),
    "nine associations": asking(SOLICIT, *[ia()] * 9),
    "17 addresses": asking(REQUEST, ia(*[OWN] * 17), server=SERVER),
    "an option longer than the message": SOLICITED + b"\0\6\xff\xff",
}  # fmt: skip


@pytest.mark.parametrize("body", UNANSWERED.values(), ids=UNANSWERED)
def test_messages_for_other_servers_get_no_answer(body: bytes) -> None:
    assert is_unanswered(body)


def test_only_this_guests_messages_to_the_all_servers_group_are_answered() -> None:
    assert not is_unanswered(SOLICITED)
    assert is_unanswered(SOLICITED, port=546)
    assert is_unanswered(SOLICITED, target=IPv6Address("fd00::1"))
    assert is_unanswered(SOLICITED, target=IPv6Address("ff05::1:3"))
    assert is_unanswered(SOLICITED, source=OWN)
    assert is_unanswered(SOLICITED, source=frame.NOBODY)
    other_mac = in_frame(SOLICITED)[:6] + b"\x02\0\0\0\0\1" + in_frame(SOLICITED)[12:]
    assert lease.answer(other_mac, made()) is None
