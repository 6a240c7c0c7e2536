"""An attacker with a VM's fetch key, who may connect to tapmanager as QEMU's user, gets no taps."""

from __future__ import annotations

import json
import pwd
import subprocess
import sys
import time
from typing import Self

import pytest
from tap_node import TapNode, sandbox

from tapmanager import protocol

pytestmark = [pytest.mark.network, pytest.mark.hostile]

# A user id that nothing else on the machine has.
OWN = 3_000_000_000

# Makes a request for each input line, and prints each result.
_ASK = """
import os
import sys
from typing import Self
from tapmanager import protocol
if int(sys.argv[4]):
    os.setgroups([])
    os.setgid(os.stat(sys.argv[1]).st_gid)
    os.setuid(int(sys.argv[4]))
for _ in sys.stdin:
    try:
        answer, fds = protocol.call(sys.argv[1], "fetch", {"sandbox": sys.argv[2], "key": sys.argv[3]}, 10.0)
        protocol.close_all(fds)
        print("taps", len(fds), flush=True)
    except protocol.RemoteError as exc:
        print(exc.kind, exc, flush=True)
    except (BrokenPipeError, ConnectionResetError):  # turned away before it could ask
        print("turned away", flush=True)
"""


class Asker:
    """An attacking process."""

    def __init__(self, node: TapNode, which: str, key: str, uid: int = 0) -> None:
        node.folder.chmod(0o711)
        command = [sys.executable, "-c", _ASK, node.socket, which, key, str(uid)]
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
    return answer.startswith("permission the network of sandbox") and "works for one start by virtshim" in answer


def test_a_key_gives_nothing_before_virtshim_starts_the_vm(tap_node: TapNode) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    with Asker(tap_node, which, key) as thief:
        assert refused(thief.ask())
    tap_node.release(which)


def test_a_key_used_by_a_vm_gives_nothing_to_another_process(tap_node: TapNode) -> None:
    """This holds after that VM has ended and after a restart of tapmanager."""
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


def test_an_unused_key_expires_after_two_minutes(tap_node: TapNode) -> None:
    """virtshim was killed during the start, so nobody revoked the key."""
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    tap_node.arm(which)
    tap_node.stop()
    placement = json.loads(tap_node.placement(which).read_text())
    assert 0 < placement["open_until"] - time.clock_gettime(time.CLOCK_BOOTTIME) <= 120
    placement["open_until"] = int(time.clock_gettime(time.CLOCK_BOOTTIME))
    tap_node.placement(which).write_text(json.dumps(placement))
    tap_node.start()
    with Asker(tap_node, which, key) as thief:
        assert refused(thief.ask())
    tap_node.release(which)


def test_each_start_by_virtshim_makes_the_key_valid_once(tap_node: TapNode) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    for _ in range(2):
        tap_node.arm(which)
        with Asker(tap_node, which, key) as qemu:
            assert qemu.ask() == "taps 1"
    tap_node.release(which)


def test_a_start_gets_its_taps_if_tapmanager_restarts_during_it(tap_node: TapNode) -> None:
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


def test_a_failed_start_leaves_no_valid_key(tap_node: TapNode) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    tap_node.arm(which)
    tap_node.call("disarm", {"sandbox": which})
    with Asker(tap_node, which, key) as thief:
        assert refused(thief.ask())
    tap_node.release(which)
    tap_node.call("disarm", {"sandbox": which})


def test_a_key_gives_nothing_to_other_users_than_the_vms(tap_node: TapNode) -> None:
    """Neither another VM's user nor the users' common group may use it; a wrong user does not use up the start."""
    which, other = sandbox(), sandbox()
    key = tap_node.attach(which)["fetch_key"]
    tap_node.attach(other)
    tap_node.arm(which, uid=OWN)
    tap_node.arm(other, uid=OWN + 1)
    for uid in (OWN + 1, pwd.getpwnam("libvirt-qemu").pw_uid):
        with Asker(tap_node, which, key, uid) as thief:
            assert "for this key" in thief.ask()
    with Asker(tap_node, which, key, OWN) as qemu:
        assert qemu.ask() == "taps 1"
    tap_node.release(which)
    tap_node.release(other)


def test_a_user_of_no_vm_cannot_connect(tap_node: TapNode) -> None:
    which = sandbox()
    key = tap_node.attach(which)["fetch_key"]
    tap_node.arm(which, uid=OWN)
    with Asker(tap_node, which, key, OWN + 1) as stranger:
        answer = stranger.ask()
        assert answer == "turned away" or "may not use tapmanager" in answer
    tap_node.release(which)
