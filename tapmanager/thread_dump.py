"""Where each thread of this process is, written to a file when SIGUSR1 comes: for `virtshim diag`. Standard library alone; the
other programs use it as well.

Written by the main thread, under the interpreter's lock, so that no thread moves meanwhile: a dump harms nothing, and a process
that hangs in C answers with none. Files, lines and functions; no values.
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
    """Beside the socket that a program serves."""
    return f"{socket}.threads"


def write_when_asked(socket: str) -> None:
    """From now on. Called in the main thread."""
    path = path_of(socket)

    def write(_signal: int, _frame: FrameType | None) -> None:
        # Whatever is wrong with the file must not reach the code that was interrupted.
        with contextlib.suppress(Exception):
            _replace(path, all_threads())

    signal.signal(SIGNAL, write)


def all_threads() -> str:
    """The innermost call last."""
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
