"""A lost connection to libvirt comes back."""

from __future__ import annotations

import threading
from pathlib import Path

import libvirt
import pytest
from podclient import wait_until

from virtshim.model.errors import NotFound, Unavailable
from virtshim.vm.connection import Connection

WAIT_LIMIT = 20.0


def test_before_it_is_open_calls_fail_at_once_and_say_why() -> None:
    connection = Connection("test:///default")
    assert "has not been connected yet" in connection.trouble()
    with pytest.raises(Unavailable, match="list VMs: libvirt at test:///default"), connection.using("list VMs"):
        pass
    connection.close()


def test_an_error_of_libvirt_becomes_ours_and_the_connection_stays() -> None:
    connection = Connection("test:///default")
    connection.start()
    assert connection.wait_open(WAIT_LIMIT)
    with pytest.raises(NotFound), connection.using("look") as conn:
        conn.lookupByName("nobody")
    assert connection.trouble() == ""
    connection.close()
    connection.close()
    assert "closed" in connection.trouble()


def test_opening_is_retried_until_it_succeeds(tmp_path: Path) -> None:
    node = tmp_path / "node.xml"  # what libvirt's test driver makes a node of
    connection = Connection(f"test://{node}")
    connection.start()
    wait_until(lambda: "cannot be reached" in connection.trouble(), WAIT_LIMIT, "it has been tried")
    node.write_text("<node/>")
    assert connection.wait_open(WAIT_LIMIT)
    assert connection.trouble() == ""
    connection.close()


def test_the_reason_for_a_failed_open_is_reported_as_trouble() -> None:
    connection = Connection("nonsense:///")
    connection.start()
    assert not connection.wait_open(0.3)
    assert "libvirt at nonsense:/// cannot be reached" in connection.trouble()
    connection.close()


def test_a_lost_connection_is_opened_again_and_listeners_are_notified() -> None:
    prepared: list[libvirt.virConnect] = []
    announced = threading.Semaphore(0)
    connection = Connection("test:///default")
    connection.on_open(prepared.append, announced.release)
    connection.start()
    assert announced.acquire(timeout=WAIT_LIMIT)
    prepared[0].isAlive = lambda: 0  # libvirt's test driver is part of this process, and never gone
    with pytest.raises(Unavailable, match="was lost"), connection.using("look") as conn:
        conn.lookupByName("nobody")
    assert announced.acquire(timeout=WAIT_LIMIT)
    assert len(prepared) == 2
    with connection.using("list") as conn:
        assert conn is prepared[1]
    connection.close()


def test_a_connection_that_cannot_be_prepared_is_not_used() -> None:
    failures = [RuntimeError("no"), RuntimeError("no")]

    def prepare(_: libvirt.virConnect) -> None:
        if failures:
            raise failures.pop()

    connection = Connection("test:///default")
    connection.on_open(prepare, lambda: None)
    connection.start()
    assert connection.wait_open(WAIT_LIMIT)
    assert not failures
    connection.close()


def lose(connection: Connection) -> None:
    with connection.using("ask libvirt") as conn:
        conn.close()
        conn.getHostname()


def test_a_listener_that_crashes_does_not_keep_a_lost_connection_from_coming_back() -> None:
    told = threading.Semaphore(0)

    def crash() -> None:
        told.release()
        raise RuntimeError("can't start new thread")

    connection = Connection("test:///default")
    connection.on_open(lambda _conn: None, crash)
    connection.start()
    assert told.acquire(timeout=WAIT_LIMIT)
    with pytest.raises(Unavailable):
        lose(connection)
    assert told.acquire(timeout=WAIT_LIMIT)
    connection.close()
