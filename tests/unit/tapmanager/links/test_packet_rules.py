"""Rules for packets, on kernels that lack a part; what real ones say is in the integration tests."""

from __future__ import annotations

import errno
import os
import socket
from typing import Self

import pytest

from tapmanager.links import netlink, packet_rules


class _Asked:
    """A raw socket of a family that the kernel has."""

    def __init__(self, family: int, *_: object) -> None:
        if family == socket.AF_INET6 and _Asked.refusal:
            raise OSError(_Asked.refusal, os.strerror(_Asked.refusal))
        self.family = family

    refusal = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """By family that in which there are rules; all families have the tables filter and nat."""
    found: dict[int, str] = {}
    monkeypatch.setattr(netlink, "dump", lambda *_: [])
    monkeypatch.setattr(packet_rules, "_names", lambda kind: ("filter", "nat"))
    monkeypatch.setattr(packet_rules, "_has_rules", lambda sock, level, table: found.get(sock.family) == table)
    monkeypatch.setattr(socket, "socket", _Asked)
    monkeypatch.setattr(_Asked, "refusal", 0)
    return found


def test_tables_without_rules_are_nothing(tables: dict[int, str]) -> None:
    assert packet_rules.first() == ""


def test_a_table_with_rules_is_named(tables: dict[int, str]) -> None:
    tables[socket.AF_INET6] = "nat"
    assert packet_rules.first() == "ip6_tables nat"


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.ENOPROTOOPT])
def test_a_kernel_without_ipv6_has_none_of_its_rules(
    tables: dict[int, str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(_Asked, "refusal", number)
    assert packet_rules.first() == ""
    tables[socket.AF_INET] = "filter"
    assert packet_rules.first() == "ip_tables filter"


def test_what_else_the_kernel_refuses_is_told(tables: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Asked, "refusal", errno.EPERM)
    with pytest.raises(PermissionError):
        packet_rules.first()
