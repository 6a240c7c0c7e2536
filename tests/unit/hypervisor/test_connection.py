"""A connection that comes back."""

from __future__ import annotations

import threading

import libvirt
import pytest

from virtshim.domain.errors import NotFound, Unavailable
from virtshim.hypervisor import connection as module
from virtshim.hypervisor.connection import Connection

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


def test_it_tries_again_until_it_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    real = libvirt.open
    tries: list[str] = []

    def open_third_time(uri: str) -> libvirt.virConnect:
        tries.append(uri)
        return real("nonsense:///" if len(tries) < 3 else uri)

    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(libvirt, "open", open_third_time)
    connection = Connection("test:///default")
    connection.start()
    assert connection.wait_open(WAIT_LIMIT)
    assert len(tries) == 3
    connection.close()


def test_the_reason_why_it_cannot_be_opened_is_trouble() -> None:
    connection = Connection("nonsense:///")
    connection.start()
    assert not connection.wait_open(0.3)
    assert "libvirt at nonsense:/// cannot be reached" in connection.trouble()
    connection.close()


def test_a_lost_connection_is_opened_again_and_everybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    dead: set[int] = set()
    prepared: list[libvirt.virConnect] = []
    announced = threading.Semaphore(0)
    monkeypatch.setattr(module, "_is_alive", lambda conn: id(conn) not in dead)
    connection = Connection("test:///default")
    connection.on_open(prepared.append, announced.release)
    connection.start()
    assert announced.acquire(timeout=WAIT_LIMIT)
    dead.add(id(prepared[0]))
    with pytest.raises(Unavailable, match="was lost"), connection.using("look") as conn:
        conn.lookupByName("nobody")
    assert announced.acquire(timeout=WAIT_LIMIT)
    assert len(prepared) == 2
    with connection.using("list") as conn:
        assert conn is prepared[1]
    connection.close()


def test_a_connection_that_cannot_be_prepared_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
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
