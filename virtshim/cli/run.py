"""`virtshim run IMAGE` runs a VM with its console in this terminal, and removes it when it ends or the user leaves."""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

from virtshim.cli.pulling import pull
from virtshim.cli.sessions import Detached, relay
from virtshim.cri.client import NodeClient, WantedVm, connected
from virtshim.model.errors import InvalidRequest, ShimError, Unavailable
from virtshim.model.text import parse_bytes
from virtshim.streaming import client as streaming

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# Seconds between two checks whether the VM's end is recorded, and how long to wait for it.
_LOOK, _RECORDED = 0.2, 60.0


def wanted_vm(
    image: str, name: str, memory: str, cpus: float, annotations: Sequence[str], env: Sequence[str]
) -> WantedVm:
    """Builds the VM's description from the options. Raises InvalidRequest, which names the wrong option."""
    name = name or f"run-{secrets.token_hex(4)}"
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"--name {name[:80]!r}: must be at most 63 letters a to z, digits and hyphens")
    if not 0 <= cpus <= 255:
        raise InvalidRequest(f"--cpu {cpus:g}: must be a number of processors, at most 255")
    return WantedVm(
        name=name,
        image=image,
        annotations=dict(_pairs("--annotation", annotations)),
        env=tuple(_pairs("--env", env)),
        memory=_bytes(memory),
        cpus=cpus,
    )


def _pairs(option: str, given: Sequence[str]) -> Iterator[tuple[str, str]]:
    for one in given:
        key, equals, value = one.partition("=")
        if not (key and equals):
            raise InvalidRequest(f"{option} {one[:80]!r}: must be NAME=VALUE")
        yield key, value


def _bytes(text: str) -> int:
    """Parses a size as in a pod's memory limit."""
    try:
        return parse_bytes(text) if text else 0
    except InvalidRequest as exc:
        raise InvalidRequest(f"--memory: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a virtshim that restarts. `away`: seconds within which it must serve again. `again`: seconds
    between two tries."""

    away: float = 60.0
    again: float = 1.0


class Signals:
    """The first SIGINT, SIGTERM or SIGHUP raises SystemExit, so that the program removes what it made. In a shielded block
    the signal waits until the block ends, because what is being created there has no name yet. Later signals are ignored: a
    shell forwards its own SIGHUP, and the kernel sends another one."""

    def __init__(self) -> None:
        self._shielded = False
        self._pending = 0

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._arrived) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
        if self._pending:
            sys.exit(128 + self._pending)

    def hold(self) -> None:
        """From now on no signal ends the program, because it is ending anyway."""
        self._shielded = True

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        if self._pending:
            return
        self._pending = number
        if not self._shielded:
            sys.exit(128 + number)


def run(socket: str, admin: str, wanted: WantedVm, *, always_pull: bool = False, quiet: bool = False) -> int:
    """Returns the guest's exit code, or 0 if the user left. Raises ShimError, or SystemExit after a signal. The VM is removed
    in every case."""
    signals = Signals()
    with signals.caught(), connected(socket) as node:
        if always_pull or not node.image_id(wanted.image):
            pull(socket, admin, wanted.image, quiet=quiet)
        return use_vm(node, wanted, lambda vm: _attached(node, vm, wanted, quiet=quiet), signals)


def use_vm(
    node: NodeClient, wanted: WantedVm, use: Callable[[str], int], signals: Signals, patience: Patience = Patience()
) -> int:
    """Makes the VM, calls `use` with its id and returns the result. The VM is removed in every case."""
    mark = secrets.token_hex(16)
    try:
        with signals.shield():
            pod = node.make_pod(wanted, mark)
        with signals.shield():
            vm = node.start_vm(pod, wanted, mark)
        return use(vm)
    finally:
        _remove(node, mark, signals, patience)


def _attached(node: NodeClient, vm: str, wanted: WantedVm, *, quiet: bool) -> int:
    interactive = sys.stdin.isatty()
    if wanted.command:
        url, tty = node.attach_url(vm, tty=wanted.tty), wanted.tty
    else:
        url, tty = node.console_url(vm, stdin=True), True
    if not quiet:
        _say(
            f"{wanted.name} ({vm[:12]}) boots; "
            + ("ctrl-] leaves and removes it" if interactive else "ctrl-c removes it")
        )
    with contextlib.closing(streaming.connect(url)) as client:
        try:
            # The console shows the guest until the VM ends, also if there is nothing to type (`</dev/null`).
            relay(client, stdin=True, is_terminal=tty, detachable=interactive, endless=not wanted.command)
        except Detached:
            client.flush()
            return 0
    return _code(node, vm, quiet=quiet)


def _code(node: NodeClient, vm: str, *, quiet: bool) -> int:
    """The exit code, once the VM's end is recorded: the stream may end a moment earlier."""
    pause, left = threading.Event(), _RECORDED
    while not (how := node.how_is(vm)).is_over and left > 0:
        pause.wait(_LOOK)
        left -= _LOOK
    if how.message and not quiet:
        _say(f"{how.reason}: {how.message}")
    return how.code if how.is_over else 1


def _remove(node: NodeClient, mark: str, signals: Signals, patience: Patience) -> None:
    """Removes the VM and holds signals meanwhile, because a second Ctrl-C must not leave a VM behind."""
    try:
        signals.hold()
        _once_it_serves(node, mark, patience)
    except ShimError as exc:
        _say(
            f"the VM could not be removed: {exc}; find its pod with `crictl pods --label virtshim.io/run={mark}` and remove it "
            "with `crictl rmp -f`"
        )


def _once_it_serves(node: NodeClient, mark: str, patience: Patience) -> None:
    """Removes the VM, waiting for virtshim if need be: a restart of virtshim also ends the console stream, and with it this
    program. Raises ShimError."""
    until, said, pause = time.monotonic() + patience.away, False, threading.Event()
    while True:
        try:
            node.remove_marked(mark)
        except Unavailable:
            if time.monotonic() >= until:
                raise
            if not said:
                _say(f"virtshim does not answer; waiting up to {patience.away:.0f} s for it, to remove the VM")
            said = True
            pause.wait(patience.again)
        else:
            return


def _say(text: str) -> None:
    """Ignores a terminal that has hung up, so that the VM is removed all the same."""
    with contextlib.suppress(OSError):
        print(f"\r\nrun: {text}\r" if sys.stderr.isatty() else f"run: {text}", file=sys.stderr, flush=True)
