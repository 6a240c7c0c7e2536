"""Somebody has read a VM's fetch key, from its definition for example, and may connect to tapmanager as QEMU's user."""

from __future__ import annotations

import subprocess
import sys
from typing import Self

import pytest
from tap_node import TapNode, sandbox

from tapmanager import protocol

pytestmark = [pytest.mark.network, pytest.mark.hostile]

# Asks as often as lines come in, and says each time what it got.
_ASK = """
import sys
from typing import Self
from tapmanager import protocol
for _ in sys.stdin:
    try:
        answer, fds = protocol.call(sys.argv[1], "fetch", {"sandbox": sys.argv[2], "key": sys.argv[3]}, 10.0)
        protocol.close_all(fds)
        print("taps", len(fds), flush=True)
    except protocol.RemoteError as exc:
        print(exc.kind, exc, flush=True)
"""


class Asker:
    """A process of its own."""

    def __init__(self, node: TapNode, which: str, key: str) -> None:
        command = [sys.executable, "-c", _ASK, node.socket, which, key]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=20)


def refused(answer: str) -> bool:
    return answer.startswith("permission the network of sandbox") and "good for one start by virtshim" in answer


def test_a_key_opens_nothing_before_virtshim_starts_the_vm(tap_node: TapNode) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    with Asker(tap_node, which, key) as thief:
        assert refused(thief.ask())
    tap_node.release(which)


def test_a_key_that_a_vms_process_has_used_opens_nothing_to_another_one(tap_node: TapNode) -> None:
    """Also after that VM has ended, and after a restart of tapmanager."""
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    tap_node.arm(which)
    with Asker(tap_node, which, key) as qemu, Asker(tap_node, which, key) as thief:
        assert qemu.ask() == "taps 1"
        assert refused(thief.ask())
        tap_node.stop()
        tap_node.start()
        assert refused(thief.ask())
        assert qemu.ask() == "taps 1", "its connection may have broken: the same process may ask again"
    with Asker(tap_node, which, key) as thief:
        assert refused(thief.ask())
    tap_node.release(which)


def test_each_start_by_virtshim_opens_it_once_more(tap_node: TapNode) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    for _ in range(2):
        tap_node.arm(which)
        with Asker(tap_node, which, key) as qemu:
            assert qemu.ask() == "taps 1"
    tap_node.release(which)


def test_a_start_that_tapmanager_was_restarted_in_gets_its_taps(tap_node: TapNode) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    tap_node.arm(which)
    tap_node.stop()
    tap_node.start()
    with Asker(tap_node, which, key) as qemu:
        assert qemu.ask() == "taps 1"
    tap_node.release(which)


def test_a_wrong_key_does_not_use_up_a_start(tap_node: TapNode) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    tap_node.arm(which)
    with pytest.raises(protocol.RemoteError, match="for this key"):
        protocol.call(tap_node.socket, "fetch", {"sandbox": which, "key": "0" * 64}, 10.0)
    with Asker(tap_node, which, key) as qemu:
        assert qemu.ask() == "taps 1"
    tap_node.release(which)


def test_a_start_that_failed_leaves_nothing_open(tap_node: TapNode) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    tap_node.arm(which)
    tap_node.call("disarm", {"sandbox": which})
    with Asker(tap_node, which, key) as thief:
        assert refused(thief.ask())
    tap_node.release(which)
    tap_node.call("disarm", {"sandbox": which})
