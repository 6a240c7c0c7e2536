"""Packet rules are read on kernels that lack a part of them. The integration tests read those of a real kernel."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

import pytest

from tapmanager.links import packet_rules


class Kernel:
    """`rules`: by family the table in which there are some; all families have the tables filter and nat. `refusal`: the number
    of the error that asking for IPv6's gets."""

    def __init__(self, rules: dict[int, str], refusal: int = 0) -> None:
        self.rules = rules
        self.refusal = refusal

    def first(self) -> str:
        return packet_rules.of_the_old_kind(lambda _kind: ("filter", "nat"), self.with_rules)

    def with_rules(self, tables: Sequence[str], family: int, _level: int) -> str:
        assert tables == ("filter", "nat")
        if family == socket.AF_INET6 and self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        return self.rules.get(family, "")


def test_tables_without_rules_are_ignored() -> None:
    assert Kernel({}).first() == ""


def test_a_table_with_rules_is_named() -> None:
    assert Kernel({socket.AF_INET6: "nat"}).first() == "ip6_tables nat"


def test_a_kernel_without_tables_is_not_asked_for_their_rules() -> None:
    def asked(*_: object) -> str:
        pytest.fail("it takes a right to ask")

    assert packet_rules.of_the_old_kind(lambda _kind: (), asked) == ""


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.ENOPROTOOPT])
def test_a_kernel_without_ipv6_has_no_ipv6_rules(number: int) -> None:
    assert Kernel({}, number).first() == ""
    assert Kernel({socket.AF_INET: "filter"}, number).first() == "ip_tables filter"


def test_other_refusals_of_the_kernel_are_reported() -> None:
    with pytest.raises(PermissionError):
        Kernel({}, errno.EPERM).first()
