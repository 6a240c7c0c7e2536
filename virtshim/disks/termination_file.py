"""kubelet's files for containers' termination messages. Implements `virtshim.guest.ports.TerminationFiles`."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

from virtshim.model.errors import InternalError, InvalidRequest

# A name that was put in its place must not lead elsewhere, and nobody's FIFO is waited for.
_SAFE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class TerminationFileStore:
    def write(self, path: str, pod_uid: str, message: bytes) -> None:
        top, below = _split_at_pod(path, pod_uid)
        try:
            with contextlib.ExitStack() as opened:
                here = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                opened.callback(os.close, here)
                *directories, name = filter(None, below.split("/"))
                for directory in directories:
                    here = os.open(directory, os.O_PATH | os.O_DIRECTORY | _SAFE_FLAGS, dir_fd=here)
                    opened.callback(os.close, here)
                file = os.open(name, os.O_WRONLY | _SAFE_FLAGS, dir_fd=here)
                opened.callback(os.close, file)
                _overwrite(file, path, message)
        except OSError as exc:
            raise InternalError(f"the termination message cannot be written to {path}: {exc.strerror}") from exc


def _split_at_pod(path: str, pod_uid: str) -> tuple[str, str]:
    """kubelet's own directory, which may lead over links, and what is below it, which may not: .../pods/UID/... belongs to a
    pod. A path without such a part is followed over no link at all."""
    top, mark, below = path.partition(f"/pods/{pod_uid}/")
    if not mark:
        return "/", path
    return top or "/", mark + below


def _overwrite(file: int, path: str, message: bytes) -> None:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise InvalidRequest(f"{path} is not a private regular file: the termination message is not written there")
    os.ftruncate(file, 0)
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(file, rest) :]
