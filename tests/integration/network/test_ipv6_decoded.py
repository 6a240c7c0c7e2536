"""tcpdump decodes all DHCPv6 answers and router advertisements for guests."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from pathlib import Path

import pytest
from ipv6_guest import decoded

from tapmanager.ipv6 import frame, lease, routers
from tapmanager.ipv6.frame import Packet
from tapmanager.ipv6.lease import (
    OPT_CLIENT_ID,
    OPT_IA_NA,
    OPT_IA_PD,
    OPT_IA_TA,
    OPT_RAPID_COMMIT,
    OPT_SERVER_ID,
    Option,
    address_option,
    build_message,
    encode_options,
)
from tapmanager.network_values import WITH_IP, Dns
from tapmanager.pod import Neighbour, Nic, Route

pytestmark = pytest.mark.network

MAC, GATEWAY_MAC = bytes.fromhex("0a58c0a80002"), "02:00:00:00:00:11"
GUEST = IPv6Address("fe80::858:c0ff:fea8:2")
NIC = Nic(
    link="eth0", mac="0a:58:c0:a8:00:02", link_mac="02:00:00:00:00:01", bridge="br0", bridge_mac="02:00:00:00:00:02", tap="tap0",
    mtu=1450, addresses=("fd00::5/64", "fd00:1::5/128"), link_addresses=(), link_routes=(), filter=WITH_IP,
    routes=(Route("fd00:9::/64"), Route("fd00:7::/48", "fe80::2"), Route("fd00:8::8/128", "fd00::1"), Route("::/0", "fd00::1")),
    neighbours=(Neighbour("fe80::2", GATEWAY_MAC),),
)  # fmt: skip
DNS = Dns(("fd00::10", "fd00::11"), ("default.svc.cluster.local", "cluster.local"))


def asked(kind: int, *options: Option, server: bool = False) -> bytes:
    head = [(OPT_CLIENT_ID, b"\0\3\0\1" + MAC), *([(OPT_SERVER_ID, lease.SERVER_ID)] if server else [])]
    body = frame.udp(546, 547, build_message(kind, b"abc", [*head, *options]))
    group = frame.DHCP_SERVERS
    return frame.build(Packet(MAC, frame.group_mac(group), GUEST, group, frame.UDP, body))


def ia(*addresses: str, kind: int = OPT_IA_NA, iaid: bytes = b"\0\0\0\1") -> Option:
    inner = encode_options([address_option(IPv6Address(one), 3600) for one in addresses])
    return kind, iaid + (b"" if kind == OPT_IA_TA else bytes(8)) + inner


OWN = r"\(IA_ADDR fd00::5 pltime:86400 vltime:86400\) \(IA_ADDR fd00:1::5 pltime:86400 vltime:86400\)"
GONE = r"\(IA_ADDR fd00::bad pltime:0 vltime:0\)"
NAMES = r"\(DNS-server fd00::10 fd00::11\) \(DNS-search-list default.svc.cluster.local. cluster.local.\)"
TIMES = "T1:43200 T2:75600"
ANSWERS = [
    (asked(1, ia()), rf"advertise .*\(preference 255\) \(IA_NA IAID:1 {TIMES} {OWN}\) {NAMES}"),
    (asked(1, ia(), (OPT_RAPID_COMMIT, b"")), rf"reply .*\(rapid-commit\) \(IA_NA IAID:1 {TIMES} {OWN}\) {NAMES}"),
    (asked(1, ia(), ia(iaid=b"\0\0\0\2")), r"\(IA_NA IAID:2 T1:0 T2:0 \(status-code NoAddrsAvail\)\)"),
    (asked(1, ia(), ia(kind=OPT_IA_TA)), r"\(IA_TA IAID:1 \(status-code NoAddrsAvail\)\)"),
    (asked(1, ia(), ia(kind=OPT_IA_PD)), r"\(IA_PD IAID:1 T1:0 T2:0 \(status-code NoPrefixAvail\)\)"),
    (asked(3, ia("fd00::5"), server=True), rf"reply .*\(IA_NA IAID:1 {TIMES} {OWN}\) {NAMES}"),
    (asked(3, ia("fd00::bad"), server=True), r"reply .*\(IA_NA IAID:1 T1:0 T2:0 \(status-code NotOnLink\)\)"),
    (asked(4, ia("fd00::5")), r"reply .*\(status-code Success\)"),
    (asked(4, ia("fd00::bad")), r"reply .*\(status-code NotOnLink\)"),
    (asked(5, ia("fd00::5"), server=True), rf"reply .*\(IA_NA IAID:1 {TIMES} {OWN}\) {NAMES}"),
    (asked(6, ia("fd00::5", "fd00::bad")), rf"reply .*\(IA_NA IAID:1 {TIMES} {OWN} {GONE}\) {NAMES}"),
    (asked(8, ia("fd00::5"), server=True), r"reply .*\(status-code Success\)"),
    (asked(8, ia("fd00::bad"), server=True), r"\(status-code Success\) \(IA_NA .*\(status-code NoBinding\)\)"),
    (asked(9, ia("fd00::5"), server=True), r"reply .*\(status-code Success\)"),
    (asked(11), rf"reply .*\(lifetime 86400\) {NAMES}"),
]  # fmt: skip


def test_tcpdump_decodes_every_dhcpv6_answer_as_expected(tmp_path: Path) -> None:
    given = lease.lease_for(NIC, DNS)
    assert given is not None
    found = [lease.answer(question, given) or b"" for question, _ in ANSWERS]
    lines = decoded(found, tmp_path, "ip6").splitlines()
    assert len(lines) == len(ANSWERS)
    for line, (_, wanted) in zip(lines, ANSWERS, strict=True):
        assert re.search(wanted, line), line
        assert "[udp sum ok]" in line
        assert "[|" not in line


def test_tcpdump_decodes_every_router_advertisement_as_expected(tmp_path: Path) -> None:
    announced = routers.announcement_for(NIC, DNS)
    assert announced is not None
    by_address = {str(router.address): router for router in announced.routers}
    first, second = by_address["fe80::2"], by_address["fe80::7669:7274:0:2"]
    nodes, group = frame.ALL_NODES, frame.group_mac(frame.ALL_NODES)
    frames = [
        *routers.frames(announced, first, nodes, group),
        *routers.frames(announced, second, GUEST, MAC),
        *routers.frames(announced, None, nodes, group),
    ]
    texts = decoded(frames, tmp_path, "ip6").split("00:00:00.000000")[1:]
    assert len(texts) == 3
    for text in texts:
        assert "[icmp6 sum ok] ICMP6, router advertisement" in text
        assert "hop limit 64, Flags [managed, other stateful], pref medium" in text
        assert "mtu option (5), length 8 (1):  1450" in text
        for prefix in ("fd00::/64", "fd00:9::/64"):
            assert f"{prefix}, Flags [onlink], valid time 65535s, pref. time 65535s" in text
        assert "rdnss option (25), length 40 (5):  lifetime 65535s, addr: fd00::10 addr: fd00::11" in text
        assert "lifetime 65535s, domain(s): default.svc.cluster.local. cluster.local." in text
        assert "[|" not in text
    assert [re.search(r"router lifetime (\d+)s", text)[1] for text in texts] == ["0", "65535", "0"]
    assert [re.findall(r"route info option .*?:  (\S+),", text) for text in texts] == [
        ["fd00:7::/48"],
        ["fd00:8::8/128"],
        [],
    ]
    macs = [re.findall(r"source link-address option .*: (\S+)", text) for text in texts]
    assert macs == [[GATEWAY_MAC], ["02:76:69:72:74:02"], []]
