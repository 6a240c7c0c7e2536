"""Output of other programs as text. A missing program, a failure and a timeout become text too."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Final

from virtshim.model.errors import ShimError
from virtshim.system.process import run

_SECONDS: Final = 10.0
_BYTES: Final = 4 << 20


def said(*argv: str, seconds: float = _SECONDS) -> str:
    """The program's output, below its command line."""
    head = f"$ {' '.join(argv)}\n"
    try:
        finished = run(argv, timeout=seconds, output_limit=_BYTES)
    except ShimError as exc:
        return f"{head}{exc}\n"
    output = finished.stdout.decode(errors="replace")
    if len(finished.stdout) >= _BYTES:
        output = output[: output.rfind("\n") + 1]  # half a line may hold half a secret, which would not be recognized
    errors = finished.stderr.decode(errors="replace")
    code = f"exit code {finished.returncode}\n" if finished.returncode else ""
    return head + output + errors + code


def all_said(*commands: Sequence[str], seconds: float = _SECONDS) -> str:
    return "\n".join(said(*command, seconds=seconds) for command in commands)


def file_text(path: str, most: int = 1 << 20) -> str:
    """The file's text; only the last `most` bytes if it is longer. Raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            file.seek(size - most)
            file.readline()
        return file.read(most).decode(errors="replace")


def listing(directory: str, most: int = 2000) -> str:
    """All files below the directory: modes, owners, sizes, bytes on disk, names."""
    lines = itertools.islice(_entries(directory), most + 1)
    text = "\n".join(lines)
    return f"{directory}\n{text}\n" + (f"... more than {most}\n" if text.count("\n") >= most else "")


def _entries(directory: str) -> Iterator[str]:
    for place, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted((*folders, *names)):
            path = os.path.join(place, name)
            try:
                found = os.lstat(path)
                target = f" -> {os.readlink(path)}" if os.path.islink(path) else ""
            except OSError as exc:
                yield f"{path}: {exc.strerror}"
                continue
            yield (
                f"{found.st_mode:06o} {found.st_uid:>10} {found.st_gid:>6} {found.st_size:>14} {found.st_blocks * 512:>14} "
                f"{os.path.relpath(path, directory)}{target}"
            )
