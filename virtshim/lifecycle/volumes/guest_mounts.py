"""The volumes of containers, in their guests: put in their places by way of the guest agent where cloud-init has not done it."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.domain.container import Container
from virtshim.domain.errors import Aborted, DeadlineExceeded, ShimError, Unavailable, WrongState
from virtshim.domain.guest.command import GuestCommand
from virtshim.domain.ids import ContainerId
from virtshim.domain.printable import escaped
from virtshim.domain.volumes.guest_script import NO_MODULE, NOT_MOUNTED, command
from virtshim.lifecycle.volumes.pod_volumes import PodVolumes
from virtshim.ports.clock import Clock
from virtshim.ports.guests import GuestAgents
from virtshim.ports.records import Records
from virtshim.primitives.container_threads import ContainerThreads

log = structlog.get_logger(__name__)

# Seconds: one wait for the agent and the script; the pause before the next.
_SLICE: Final = 60.0
_AGAIN: Final = 2.0


class NotMounted(WrongState):
    """The guest cannot mount them, and says why."""


@dataclass(slots=True)
class GuestMounts:
    """`agent_timeout`: seconds that a guest may take until its agent answers."""

    records: Records
    guests: GuestAgents
    volumes: PodVolumes
    clock: Clock
    agent_timeout: float
    _threads: ContainerThreads = field(default_factory=lambda: ContainerThreads("volumes"))

    def mount(self, container: Container, timeout: float, cancelled: threading.Event) -> None:
        """All of them are in their places. DeadlineExceeded, Unavailable and Aborted: to be tried again; NotMounted;
        another ShimError: it cannot be known."""
        if not container.spec.volumes:
            return
        done = self.guests.run(container.id, GuestCommand(command(container.spec.volumes)), timeout, cancelled)
        if done.code:
            why = escaped(done.stderr.decode(errors="replace").strip(), 500) or f"the script ended with {done.code}"
            remedy = "use an image with that module" if done.code == NO_MODULE else "see the guest's console"
            known = done.code in (NO_MODULE, NOT_MOUNTED)
            raise NotMounted(f"the volumes cannot be mounted in the guest: {why}" + (f"; {remedy}" if known else ""))

    def follow(self, container: Container) -> None:
        """They are put in their places as soon as the guest can do it; also again, after it was restarted. Returns at once. A
        container with a command is left to whoever begins that."""
        if container.spec.volumes and not container.spec.command:
            self._threads.start(container.id, lambda: self._follow(container.id))

    def changed(self, domain: uuid.UUID) -> None:
        """Something has happened to this domain: its guest may have been restarted."""
        for container in self.records.containers.all():
            if container.domain_uuid == domain and container.is_running:
                self.follow(container)

    def close(self) -> None:
        self._threads.close()

    # --- below: a thread of each container

    def _follow(self, wanted: ContainerId) -> None:
        until = self.clock.monotonic() + self.agent_timeout
        while not self._threads.closing.is_set() and (container := self._running(wanted)) is not None:
            try:
                self.mount(container, _SLICE, self._threads.closing)
            except NotMounted as exc:
                log.warning("volumes.not_mounted", container=wanted.short, error=str(exc))
                self.volumes.note(container, str(exc))
                return
            except ShimError as exc:
                passes = isinstance(exc, DeadlineExceeded | Unavailable | Aborted)
                if not passes or self.clock.monotonic() >= until:
                    # cloud-init may have done it; of a guest that says nothing nothing is known.
                    log.info("volumes.unconfirmed", container=wanted.short, why=str(exc))
                    return
                self.clock.wait(self._threads.closing, _AGAIN)
            else:
                log.info("volumes.mounted", container=wanted.short, volumes=len(container.spec.volumes))
                self.volumes.note(container, "")
                return

    def _running(self, wanted: ContainerId) -> Container | None:
        found = self.records.containers.get(wanted)
        return found if found is not None and found.is_running else None
