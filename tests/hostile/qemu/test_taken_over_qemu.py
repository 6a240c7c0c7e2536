"""A QEMU that its guest has taken over can use its own VM's resources, and nothing else of the node."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.hostile]

# Bytes of one VM's log: virtlogd keeps four files of 2 MiB.
MOST_LOGGED = 9 << 20
# Threads of one VM, including a few that QEMU has already.
MOST_THREADS = 1024


def test_a_taken_over_qemu_still_has_its_own_disk(battlefield: Any) -> None:
    """Otherwise the other tests here prove nothing."""
    own = battlefield.attacker.container
    found = {what: how for what, how in battlefield.tried.items() if own in what}
    assert found
    assert not [how for how in found.values() if how.startswith("refused")]


def test_a_taken_over_qemu_cannot_access_files_of_another_vm_or_the_node(battlefield: Any) -> None:
    own = battlefield.attacker.container
    got = battlefield.got("read", "write", "chmod", "list", "create")
    assert {what: how for what, how in got.items() if own not in what} == {}


def test_a_taken_over_qemu_cannot_connect_to_sockets_of_another_vm_or_the_node(battlefield: Any) -> None:
    assert battlefield.got("connect", "abstract") == {}


def test_a_taken_over_qemu_gets_no_taps_with_any_key(battlefield: Any) -> None:
    assert battlefield.got("fetch") == {}


def test_a_taken_over_qemu_cannot_signal_trace_or_read_other_processes(battlefield: Any) -> None:
    assert battlefield.got("signal", "pidfd", "ptrace", "memory") == {}


def test_a_taken_over_qemu_cannot_use_the_hosts_network(battlefield: Any) -> None:
    assert battlefield.got("tcp", "udp", "family") == {}


def test_a_taken_over_qemu_cannot_start_programs_or_enter_namespaces(battlefield: Any) -> None:
    assert battlefield.got("io_uring", "keyring") == {}
    for what in ("unshare ", "exec echo TRIED exec : got >&2"):
        assert battlefield.tried.get(what, "refused").startswith("refused")
    assert "exec " not in battlefield.tried  # the shell's output


def test_a_taken_over_qemu_leaves_no_core_dump(battlefield: Any) -> None:
    """The hard limit is one byte, or 0 ("got") where libvirt sets its own. So no dump can be written."""
    assert battlefield.tried["core "] in ("got", "1")


def test_a_taken_over_qemu_cannot_fill_the_process_table(battlefield: Any) -> None:
    assert int(battlefield.tried["threads 20000"]) <= MOST_THREADS


def test_a_taken_over_qemu_cannot_fill_the_log(battlefield: Any) -> None:
    assert "fill 64" in battlefield.tried
    assert sum(log.stat().st_size for log in battlefield.said.logs()) < MOST_LOGGED
