"""Netlink messages about virtual functions have the bytes of linux/if_link.h, and pyroute2 reads them in the same
way."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.requests.link import LinkIPRouteFilter

from tapmanager.sriov.host_links import request_of, settings_of
from tapmanager.sriov.vf_settings import LINK_STATES, VfSettings

MAC = "0a:58:0a:01:00:07"
MAC_BYTES = bytes.fromhex("0a580a010007")
NOT_TOLD = 0xFFFFFFFF


def attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def numbers(kind: int, *values: int) -> bytes:
    return attribute(kind, struct.pack(f"={len(values)}I", *values))


def told(number: int, *, vlan: bytes = b"", switches: tuple[int, int, int, int] = (1, 2, 0, 1)) -> bytes:
    """One IFLA_VF_INFO, its attributes in the order of the kernel's rtnl_fill_vfinfo()."""
    spoof, link_state, rss, trust = switches
    vlan = vlan or attribute(12, attribute(1, struct.pack("=III", number, 100, 3) + b"\x88\xa8\0\0"))
    return attribute(
        1,
        attribute(1, struct.pack("=I32s", number, MAC_BYTES))
        + attribute(13, bytes([0xFF] * 6 + [0] * 26))  # IFLA_VF_BROADCAST, which pyroute2 does not know
        + numbers(2, number, 100, 3)
        + numbers(6, number, 10, 1000)
        + numbers(3, number, 1000)
        + numbers(4, number, spoof)
        + numbers(5, number, link_state)
        + numbers(7, number, rss)
        + numbers(9, number, trust)
        + vlan
        + attribute(8, b""),
    )


def link(*functions: bytes) -> ifinfmsg:
    """RTM_NEWLINK, as pyroute2 reads it off the socket."""
    body = struct.pack("=BxHiII", 0, 1, 7, 0, 0) + attribute(3, b"enp59s0\0") + attribute(22, b"".join(functions))
    return read(struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body)


def read(message: bytes) -> ifinfmsg:
    found = ifinfmsg(message)
    found.decode()
    return found


def test_all_settings_of_a_function_are_read() -> None:
    assert settings_of(link(told(0), told(3)), 3) == VfSettings(
        mac=MAC,
        vlan=100,
        qos=3,
        protocol="802.1ad",
        min_tx_rate=10,
        max_tx_rate=1000,
        spoof_check=True,
        link_state="disable",
        rss_query=False,
        trust=True,
    )


def test_a_function_that_the_card_does_not_report_has_no_settings() -> None:
    assert settings_of(link(told(0)), 1) is None
    assert settings_of(link(), 0) is None
    assert settings_of(read(struct.pack("=IHHIIBxHiII", 32, 16, 0, 1, 0, 0, 1, 7, 0, 0)), 0) is None


def test_a_setting_that_a_driver_does_not_report_is_neither_on_nor_off() -> None:
    found = settings_of(link(told(0, switches=(NOT_TOLD, 0, NOT_TOLD, NOT_TOLD))), 0)
    assert found is not None
    assert (found.spoof_check, found.link_state, found.rss_query, found.trust) == (None, "auto", None, None)


def test_a_link_state_of_a_later_kernel_is_not_guessed_at() -> None:
    found = settings_of(link(told(0, switches=(0, 9, 0, 0))), 0)
    assert found is not None
    assert found.link_state is None


def test_a_kernel_without_vlan_protocols_means_8021q() -> None:
    found = settings_of(link(told(0, vlan=attribute(14, b""))), 0)
    assert found is not None
    assert (found.vlan, found.qos, found.protocol) == (100, 3, "802.1Q")


def test_the_protocol_of_no_vlan_means_nothing() -> None:
    none = attribute(12, attribute(1, struct.pack("=III", 0, 0, 0) + b"\x88\xa8\0\0"))
    found = settings_of(link(told(0, vlan=none)), 0)
    assert found is not None
    assert (found.vlan, found.protocol) == (0, "802.1Q")


@pytest.mark.parametrize(
    ("change", "attributes"),
    [
        (VfSettings(mac=MAC), "28000100 02000000 0a580a01 00070000" + "00000000" * 6),
        # 20 bytes, not 18: the kernel wants the whole of struct ifla_vf_vlan_info.
        (
            VfSettings(vlan=100, qos=3, protocol="802.1ad"),
            "18000c80 14000100 02000000 64000000 03000000 88a80000",
        ),
        (VfSettings(vlan=0, qos=0, protocol="802.1Q"), "18000c80 14000100 02000000 00000000 00000000 81000000"),
        (VfSettings(vlan=5, protocol="0x9100"), "18000c80 14000100 02000000 05000000 00000000 91000000"),
        (VfSettings(min_tx_rate=10, max_tx_rate=1000), "10000600 02000000 0a000000 e8030000"),
        (VfSettings(spoof_check=True), "0c000400 02000000 01000000"),
        (VfSettings(link_state="disable"), "0c000500 02000000 02000000"),
        (VfSettings(rss_query=False), "0c000700 02000000 00000000"),
        (VfSettings(trust=False), "0c000900 02000000 00000000"),
    ],
    ids=str,
)
def test_a_change_has_the_kernels_structure(change: VfSettings, attributes: str) -> None:
    wanted = bytes.fromhex(attributes)
    info = struct.pack("=HH", 4 + len(wanted), 0x8001) + wanted
    functions = struct.pack("=HH", 4 + len(info), 0x8016) + info
    head = struct.pack("=IHHII", 32 + len(functions), 19, 5, 1, 0) + struct.pack("=BxHiII", 0, 0, 7, 0, 0)
    assert request_of(7, 2, change) == head + functions


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        (VfSettings(mac=MAC), {"mac": MAC}),
        (VfSettings(min_tx_rate=10, max_tx_rate=1000), {"rate": {"min_tx_rate": 10, "max_tx_rate": 1000}}),
        (VfSettings(spoof_check=True), {"spoofchk": 1}),
        (VfSettings(link_state="enable"), {"link_state": 1}),
        (VfSettings(rss_query=True), {"rss_query_en": 1}),
        (VfSettings(trust=False), {"trust": 0}),
    ],
    ids=str,
)
def test_a_change_equals_pyroute2s_message(change: VfSettings, asked: dict[str, object]) -> None:
    theirs = ifinfmsg()
    theirs["index"] = 7
    theirs["attrs"] = [("IFLA_VFINFO_LIST", LinkIPRouteFilter("set").get_vf({"vf": 2, **asked}))]
    theirs.encode()
    flagged = bytearray(request_of(7, 2, change)[32:])
    flagged[3] = flagged[7] = 0  # we say that the two are nested, it does not
    assert bytes(flagged) == bytes(theirs.data[32:])


SETTINGS = st.builds(
    VfSettings,
    mac=st.binary(min_size=6, max_size=6).map(lambda octets: octets.hex(":")),
    vlan=st.integers(1, 4095),
    qos=st.integers(0, 7),
    protocol=st.sampled_from(["802.1Q", "802.1ad", "0x9100"]),
    min_tx_rate=st.integers(0, 1 << 31),
    max_tx_rate=st.integers(0, 1 << 31),
    spoof_check=st.booleans(),
    link_state=st.sampled_from(LINK_STATES),
    rss_query=st.booleans(),
    trust=st.booleans(),
)


@given(settings=SETTINGS, number=st.integers(0, 255))
def test_written_settings_are_read_back_unchanged(settings: VfSettings, number: int) -> None:
    assert settings_of(read(request_of(7, number, settings)), number) == settings


@given(settings=SETTINGS)
def test_settings_are_kept_in_json(settings: VfSettings) -> None:
    assert VfSettings.from_json(settings.to_json(), "x") == settings


def test_a_message_of_a_real_cards_driver_is_read() -> None:
    """Linux 6.12's igb: two VFs, the second of which was set up."""
    raw = (Path(__file__).resolve().parents[3] / "fixtures" / "netlink" / "igb-two-vfs.hex").read_text()
    message = read(bytes.fromhex(raw))
    assert settings_of(message, 0) == VfSettings(
        mac="b2:24:71:ef:7c:ee",
        vlan=0,
        qos=0,
        protocol="802.1Q",
        min_tx_rate=0,
        max_tx_rate=0,
        spoof_check=True,
        link_state="auto",
        trust=False,
    )
    assert settings_of(message, 1) == VfSettings(
        mac=MAC,
        vlan=100,
        qos=3,
        protocol="802.1Q",
        min_tx_rate=0,
        max_tx_rate=100,
        spoof_check=True,
        link_state="auto",
        trust=True,
    )
    assert settings_of(message, 2) is None
