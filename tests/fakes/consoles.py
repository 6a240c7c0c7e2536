"""Serial consoles in memory."""

from __future__ import annotations

from collections.abc import Sequence

from virtshim.domain.errors import WrongState
from virtshim.domain.guest.entrypoint import OutputPosition
from virtshim.domain.guest.streaming import Output
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


class FakeEntrypointLogs(FakeConsoles):
    """Implements `virtshim.ports.EntrypointLogs`. `places` stay, as files do."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[ContainerId, OutputPosition] = {}

    def read_to(self, container: ContainerId) -> OutputPosition:
        return self.places.get(container, OutputPosition())

    def write(self, container: ContainerId, output: Sequence[Output], read_to: OutputPosition) -> int:
        if container not in self.following:
            raise WrongState("not open")
        self.places[container] = read_to
        log_file = self.following[container]
        if log_file:
            self.logs[log_file] += [f"{piece.stream.value} {piece.data.decode()}" for piece in output]
        return sum(len(piece.data) for piece in output)
