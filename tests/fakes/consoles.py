"""Serial consoles in memory."""

from __future__ import annotations

from virtshim.domain.errors import WrongState
from virtshim.domain.ids import ContainerId


class FakeConsoles:
    """Implements `virtshim.ports.Consoles`. `following` lives and dies with the process; `logs`, by file name, stay."""

    def __init__(self) -> None:
        self.following: dict[ContainerId, str] = {}
        self.logs: dict[str, list[str]] = {}

    def open(self, container: ContainerId, log_file: str, log_directory: str = "") -> None:
        assert log_file.startswith(log_directory)
        self.following[container] = log_file
        if log_file:
            self.logs.setdefault(log_file, [])

    def reopen(self, container: ContainerId) -> None:
        log_file = self.following.get(container)
        if log_file is None:
            raise WrongState(f"the console of {container} is not followed")
        if log_file:
            self.logs.setdefault(log_file, [])

    def finish(self, container: ContainerId) -> None:
        log_file = self.following.pop(container, None)
        if log_file:
            self.logs[log_file].append("finished")

    def forget(self) -> None:
        """The process that followed is gone."""
        self.following.clear()
