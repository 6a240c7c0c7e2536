"""A container's CRI log: what its command writes if it has one, else what its console shows. The console of one with a command
is kept in bounds, but not logged."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.domain.container import Container
from virtshim.ports.consoles import Consoles, EntrypointLogs


@dataclass(frozen=True, slots=True)
class ContainerLogs:
    """Each call is that of the port behind it, and raises what it raises."""

    consoles: Consoles
    entrypoints: EntrypointLogs

    def open(self, container: Container) -> None:
        self._of(container).open(container.id, container.spec.log_file, container.log_directory)
        if container.spec.command:
            self.consoles.open(container.id, "")

    def reopen(self, container: Container) -> None:
        self._of(container).reopen(container.id)

    def note(self, container: Container, line: str) -> None:
        self._of(container).note(container.id, line)

    def finish(self, container: Container) -> None:
        self._of(container).finish(container.id)
        if container.spec.command:
            self.consoles.finish(container.id)

    def _of(self, container: Container) -> Consoles | EntrypointLogs:
        return self.entrypoints if container.spec.command else self.consoles
