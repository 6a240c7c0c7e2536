"""What this program reads from and writes to: the person's terminal, raw while a guest has it and as it was afterwards, or
whatever a shell has put in its place."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def raw(fd: int) -> Iterator[None]:
    """Nothing happens if `fd` is no terminal. It is put right also after SIGTERM and SIGHUP."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    with ended_by_signals():
        try:
            tty.setraw(fd)
            yield
        finally:
            with contextlib.suppress(termios.error):  # it has hung up
                termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program by SystemExit, so that what it made is put right, unless the caller has handlers of its
    own."""
    unhandled = [number for number in (signal.SIGTERM, signal.SIGHUP) if not callable(signal.getsignal(number))]
    handlers = {number: signal.signal(number, _leave) for number in unhandled}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def resizes() -> Iterator[int]:
    """A descriptor that becomes readable with each change of the terminal's size, and with any other signal: one that comes just
    before a select() would otherwise wait for its end."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGWINCH, lambda _number, _frame: None)
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(earlier)
        signal.signal(signal.SIGWINCH, before)
        os.close(reading)
        os.close(writing)


def size(fd: int) -> tuple[int, int] | None:
    """Columns and lines; None if `fd` is no terminal or does not know."""
    try:
        columns, lines = os.get_terminal_size(fd)
    except OSError:
        return None
    return (columns, lines) if columns and lines else None


def open_closed_streams() -> None:
    """Those of a program's three streams that its caller has closed lead nowhere. Else their numbers would be those of the next
    connections, which would get what is written to the streams, and a closed one has no file object."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  for the program's life


def write_out() -> None:
    """Standard output is written out now: when the interpreter ends nobody could tell what is wrong. Raises OSError, and what
    was not written is lost."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        raise


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
