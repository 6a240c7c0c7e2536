"""Archives of checkpoints in memory."""

from __future__ import annotations

import os.path
from collections.abc import Callable

from virtshim.model.errors import InternalError, InvalidRequest
from virtshim.model.ids import ContainerId


class FakeArchives:
    """Implements `virtshim.vm.ports.CheckpointFiles`. `files` are those in unfinished directories, by path; `finished` maps a
    location to its manifest."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.directories: set[str] = set()
        self.finished: dict[str, bytes] = {}

    def begin(self, location: str, container: ContainerId) -> str:
        if not location.startswith("/") or location.endswith("/"):
            raise InvalidRequest(f"location must be the absolute path of a file: {location}")
        directory = self._directory(location, container)
        self.discard(location, container)
        self.directories.add(directory)
        return directory

    def copy(self, source: str, target: str, check: Callable[[], None]) -> None:
        check()
        self._require(os.path.dirname(target))
        self.files[target] = source

    def finish(self, location: str, container: ContainerId, manifest: bytes, check: Callable[[], None]) -> None:
        check()
        self._require(self._directory(location, container))
        self.finished[location] = manifest

    def discard(self, location: str, container: ContainerId) -> None:
        directory = self._directory(location, container)
        self.directories.discard(directory)
        self.files = {path: source for path, source in self.files.items() if os.path.dirname(path) != directory}

    def _require(self, directory: str) -> None:
        if directory not in self.directories:
            raise InternalError(f"there is no directory {directory}")

    @staticmethod
    def _directory(location: str, container: ContainerId) -> str:
        return os.path.join(os.path.dirname(location), f".{container.short}")
