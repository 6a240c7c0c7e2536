"""Serial consoles in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from virtshim.guest.command import OutputPosition
from virtshim.model.errors import WrongState
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Output


class FakeConsoles:
    """Implements `virtshim.logs.ports.Consoles`. `following` lives and dies with the process; `logs`, by file name, stay.
    `finished`:
    the log files that were written to their end."""

    def __init__(self) -> None:
        self.following: dict[ContainerId, str] = {}
        self.logs: dict[str, list[str]] = {}
        self.finished: list[str] = []
        self._on_news: Callable[[ContainerId], None] = lambda _container: None
        self._said: dict[ContainerId, list[str]] = {}
        self._open: dict[ContainerId, list[str]] = {}  # as descriptors are: a log that is renamed stays open

    def say(self, container: ContainerId, line: str) -> None:
        """The guest writes to its console, whether or not anybody follows it."""
        self._said.setdefault(container, []).append(line)
        self._catch_up(container)
        self._on_news(container)

    def open(self, container: ContainerId, log_file: str, log_directory: str = "") -> None:
        assert log_file.startswith(log_directory)
        if container in self.following:
            return
        self.following[container] = log_file
        self.reopen(container)
        self._catch_up(container)

    def reopen(self, container: ContainerId) -> None:
        log_file = self.following.get(container)
        if log_file is None:
            raise WrongState(f"the console of {container} is not followed")
        if log_file:
            self._open[container] = self.logs.setdefault(log_file, [])

    def note(self, container: ContainerId, line: str) -> None:
        if container not in self.following:
            raise WrongState(f"the console of {container} is not followed")
        self._write(container, [f"stderr {line}\n"])

    def finish(self, container: ContainerId) -> None:
        log_file = self.following.pop(container, None)
        self._open.pop(container, None)
        if log_file:
            self.finished.append(log_file)

    def on_news(self, callback: Callable[[ContainerId], None]) -> None:
        self._on_news = callback

    def forget(self) -> None:
        """Forgets the process that followed the consoles."""
        self.following.clear()
        self._open.clear()

    def _catch_up(self, container: ContainerId) -> None:
        if container in self.following:
            self._write(container, self._said.pop(container, []))

    def _write(self, container: ContainerId, lines: Sequence[str]) -> None:
        if container in self._open:
            self._open[container] += lines


class FakeEntrypointLogs(FakeConsoles):
    """Implements `virtshim.logs.ports.EntrypointLogs`. `places` stay, as files do."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[ContainerId, OutputPosition] = {}

    def read_to(self, container: ContainerId) -> OutputPosition:
        return self.places.get(container, OutputPosition())

    def write(self, container: ContainerId, output: Sequence[Output], read_to: OutputPosition) -> int:
        if container not in self.following:
            raise WrongState("not open")
        self.places[container] = read_to
        lines = [f"{piece.stream.value} {piece.data.decode()}" for piece in output]
        self._write(container, lines)
        return sum(map(len, lines))
