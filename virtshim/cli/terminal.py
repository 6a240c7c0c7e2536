"""The person's terminal: raw while a guest has it, and as it was afterwards."""

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
    """Nothing happens if `fd` is no terminal. SIGTERM and SIGHUP end the program by SystemExit, so that it is put right, unless
    the caller has handlers of its own."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    unhandled = [number for number in (signal.SIGTERM, signal.SIGHUP) if not callable(signal.getsignal(number))]
    handlers = {number: signal.signal(number, _leave) for number in unhandled}
    try:
        tty.setraw(fd)
        yield
    finally:
        try:
            with contextlib.suppress(termios.error):  # it has hung up
                termios.tcsetattr(fd, termios.TCSADRAIN, before)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def resizes() -> Iterator[int]:
    """A descriptor that becomes readable with each change of the terminal's size."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def changed(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is readable already
            os.write(writing, b"\0")

    before = signal.signal(signal.SIGWINCH, changed)
    try:
        yield reading
    finally:
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


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
