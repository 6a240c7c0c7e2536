"""A QEMU that its guest took over reaches its own VM, and nothing else of the node."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.hostile]

# Of a VM: virtlogd keeps four files of 2 MiB.
MOST_LOGGED = 9 << 20
# Of one VM, and a few that are QEMU's already.
MOST_THREADS = 1024


def test_it_still_has_its_own_disk(battlefield: Any) -> None:
    """Otherwise all that follows says nothing."""
    own = battlefield.attacker.container
    found = {what: how for what, how in battlefield.tried.items() if own in what}
    assert found
    assert not [how for how in found.values() if how.startswith("refused")]


def test_it_reads_writes_and_changes_no_file_of_another_vm_or_of_the_node(battlefield: Any) -> None:
    own = battlefield.attacker.container
    got = battlefield.got("read", "write", "chmod", "list", "create")
    assert {what: how for what, how in got.items() if own not in what} == {}


def test_it_connects_to_no_socket_of_another_vm_or_of_the_node(battlefield: Any) -> None:
    assert battlefield.got("connect", "abstract") == {}


def test_it_gets_no_taps_with_anybodys_key(battlefield: Any) -> None:
    assert battlefield.got("fetch") == {}


def test_it_signals_traces_and_reads_no_other_process(battlefield: Any) -> None:
    assert battlefield.got("signal", "pidfd", "ptrace", "memory") == {}


def test_it_has_no_network_of_the_host(battlefield: Any) -> None:
    assert battlefield.got("tcp", "udp", "family") == {}


def test_it_starts_no_program_and_enters_no_namespace(battlefield: Any) -> None:
    assert battlefield.got("io_uring", "keyring") == {}
    for what in ("unshare ", "exec echo TRIED exec : got >&2"):
        assert battlefield.tried.get(what, "refused").startswith("refused")
    assert "exec " not in battlefield.tried  # what the shell would have said


def test_it_leaves_no_core_dump(battlefield: Any) -> None:
    """Of a byte at most, and libvirt's own limit may be 0: that it can be asked for says so."""
    assert battlefield.tried["core "] in ("got", "1")


def test_it_does_not_fill_the_process_table(battlefield: Any) -> None:
    assert int(battlefield.tried["threads 20000"]) <= MOST_THREADS


def test_it_fills_no_log(battlefield: Any) -> None:
    assert "fill 64" in battlefield.tried
    assert sum(log.stat().st_size for log in battlefield.said.logs()) < MOST_LOGGED
