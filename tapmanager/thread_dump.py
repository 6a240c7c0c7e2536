"""On SIGUSR1, writes the stack of each thread to a file, for `virtshim diag`. Uses only the standard library; the other programs
use it too.

The main thread writes the dump while it holds the interpreter's lock, so no thread moves meanwhile. A process that hangs in C
writes no dump. A dump contains files, lines and functions, but no values.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from types import FrameType

SIGNAL = signal.SIGUSR1


def path_of(socket: str) -> str:
    """The path of the dump, beside the socket that the program serves."""
    return f"{socket}.threads"


def write_when_asked(socket: str) -> None:
    """Installs the signal handler. Call this in the main thread."""
    path = path_of(socket)

    def write(_signal: int, _frame: FrameType | None) -> None:
        # An error with the file must not reach the interrupted code.
        with contextlib.suppress(Exception):
            _replace(path, all_threads())

    signal.signal(SIGNAL, write)


def all_threads() -> str:
    """The stacks of all threads, with the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sorted(sys._current_frames().items()):  # noqa: SLF001  the documented way
        calls = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
        lines = [f"  {call.filename}:{call.lineno} {call.name}" for call in reversed(calls)]
        parts.append("\n".join([f"thread {ident} {names.get(ident, 'not started by Python')}", *lines]))
    return "\n\n".join(parts) + "\n"


def _replace(path: str, text: str) -> None:
    new = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    os.replace(new, path)
