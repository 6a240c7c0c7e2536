"""Copies of containers' records beside their disks: implements `virtshim.ports.recovery.RecordCopies`."""

from __future__ import annotations

import errno
import os
from typing import Final

from virtshim.domain.errors import InternalError, ResourceExhausted
from virtshim.domain.ids import ContainerId
from virtshim.domain.layout import Layout, record_copy

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class RecordCopyFiles:
    """Files with mode 0600 in directories that QEMU's user may search."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def keep(self, container: ContainerId, text: str) -> None:
        """Not synced: a power cut ends the VM that it is for."""
        path = record_copy(self._layout, container)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(text)
        except OSError as exc:
            kind = ResourceExhausted if exc.errno in _FULL else InternalError
            raise kind(f"container {container}: the copy of its records cannot be written: {exc.strerror}") from exc

    def read(self, container: ContainerId) -> str:
        """See the port."""
        path = record_copy(self._layout, container)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, encoding="ascii", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""
        except OSError as exc:
            raise InternalError(
                f"container {container}: the copy of its records cannot be read: {exc.strerror}"
            ) from exc
