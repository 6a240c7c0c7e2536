"""ReopenContainerLog: kubelet has renamed the log to rotate it."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.domain.container import Container
from virtshim.domain.errors import WrongState
from virtshim.lifecycle.container_logs import ContainerLogs


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
