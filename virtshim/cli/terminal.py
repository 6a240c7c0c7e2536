"""The terminal, or the streams that a shell puts in its place. A terminal is raw while a guest uses it, and is restored
afterwards."""

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
    """Makes the terminal `fd` raw, and restores it also after SIGTERM and SIGHUP. Does nothing if `fd` is not a terminal."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    with ended_by_signals():
        try:
            tty.setraw(fd)
            yield
        finally:
            with contextlib.suppress(termios.error):  # the terminal has hung up
                termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise SystemExit, so that the program cleans up. Handlers that the caller has
    installed stay."""
    unhandled = [number for number in (signal.SIGTERM, signal.SIGHUP) if not callable(signal.getsignal(number))]
    handlers = {number: signal.signal(number, _leave) for number in unhandled}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def resizes() -> Iterator[int]:
    """A descriptor that becomes readable when the terminal's size changes, and on any other signal: a signal that arrives
    just before a select() would otherwise wait until the select() ends."""
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
    """(columns, lines); None if `fd` is not a terminal or does not know its size."""
    try:
        columns, lines = os.get_terminal_size(fd)
    except OSError:
        return None
    return (columns, lines) if columns and lines else None


def open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that the caller has closed. Otherwise the next connection would get the
    stream's number and receive its output, and a closed stream has no file object."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # takes the lowest free number, which is this stream's
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  for the program's life


def write_out() -> None:
    """Flushes standard output now, because errors at the interpreter's exit could not be reported. Raises OSError; output
    that could not be written is lost."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        raise


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
