"""ReopenContainerLog: kubelet has renamed the log to rotate it."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.logs.ports import Consoles, EntrypointLogs
from virtshim.model.container import Container
from virtshim.model.errors import WrongState

# A container's CRI log: what its command writes if it has one, else what its console shows. The console of one with a
# command is kept in bounds, but not logged.


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


@dataclass(frozen=True, slots=True)
class ReopenContainerLog:
    """Takes no lock: a rotation must not wait for a stop that is under way."""

    logs: ContainerLogs

    def reopen(self, container: Container) -> None:
        """The new file is there on return, and nothing more is written to the old one. WrongState if the container does not
        run: its log is complete, and kubelet renames it back."""
        if not container.is_running:
            raise WrongState(
                f"container {container.id} is {container.phase.value}: only a running container's log can be reopened"
            )
        if container.spec.log_file:
            self.logs.reopen(container)
