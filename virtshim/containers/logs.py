"""A container's CRI log, and ReopenContainerLog, which kubelet calls after it has renamed the log to rotate it."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.logs.ports import Consoles, EntrypointLogs
from virtshim.model.container import Container
from virtshim.model.errors import WrongState

# The CRI log holds the output of the container's command, or of its console if the container has no command. The
# console of a container with a command is size-limited, but not logged.


@dataclass(frozen=True, slots=True)
class ContainerLogs:
    """Each method passes the call to the port that writes the log, and raises that port's errors."""

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
    """Takes no lock: a rotation must not wait for a stop."""

    logs: ContainerLogs

    def reopen(self, container: Container) -> None:
        """On return the new file exists and the old one gets no more lines. Raises WrongState if the container does not
        run: its log is then complete, and kubelet renames it back."""
        if not container.is_running:
            raise WrongState(
                f"container {container.id} is {container.phase.value}: only a running container's log can be reopened"
            )
        if container.spec.log_file:
            self.logs.reopen(container)
