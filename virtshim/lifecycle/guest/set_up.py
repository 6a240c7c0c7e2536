"""What is set up in a guest before anything runs in it for its container: the pod's sysctls, its volumes in their places, and
policy routes.

cloud-init does it while the guest boots; by way of the guest agent it is done where cloud-init has not, and copies of volumes
become what kubelet has written last. Policy routes are for the agent alone.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.domain.container import Container
from virtshim.domain.devices import guest_links
from virtshim.domain.errors import Aborted, DeadlineExceeded, ShimError, Unavailable, WrongState
from virtshim.domain.guest import policy_routes, sysctls
from virtshim.domain.guest.command import CommandResult, GuestCommand
from virtshim.domain.ids import ContainerId
from virtshim.domain.network import nics_of
from virtshim.domain.printable import escaped
from virtshim.domain.volumes import empty_disks, guest_script
from virtshim.domain.volumes.confirmed import with_told
from virtshim.domain.volumes.copies import SHARED_ANNOTATION, Packed, archive, paths_of
from virtshim.lifecycle.volumes.copies import VolumeCopies
from virtshim.lifecycle.volumes.pod_volumes import PodVolumes
from virtshim.ports.clock import Clock
from virtshim.ports.guests import GuestAgents
from virtshim.ports.records import Records
from virtshim.primitives.container_threads import ContainerThreads
from virtshim.primitives.live import Live
from virtshim.primitives.pod_locks import PodLocks

log = structlog.get_logger(__name__)

# Seconds: one wait for the agent and the scripts; the pause before the next.
_SLICE: Final = 60.0
_AGAIN: Final = 2.0
_MOST_TOLD: Final = 500

_COPIED: Final = "its configMap, secret, downwardAPI and projected volumes, the service account token among them,"
_REFUSED: Final = (
    f"{_COPIED} are as they were when its VM was made, if cloud-init has put them there, and are not renewed (the annotation "
    f"{SHARED_ANNOTATION}: shared has them by virtiofs)"
)
_UNHEARD: Final = (
    "no guest agent has answered: {what} in the guest only if its image has cloud-init{renewed}; install qemu-guest-agent in the "
    "image"
)


_UNROUTED: Final = (
    "policy routes (CNI's sbr) are not set in the guest: {why}; use an image whose guest agent may run commands"
)


class NotSetUp(WrongState):
    """The guest cannot have it, and says why."""


class _NotYet(Unavailable):
    """The guest's own network is not there yet; all else is set up."""


@dataclass(frozen=True, slots=True)
class _Part:
    """`remedies`: by the code that its script ends with, for causes that it knows. `copies`: it tells which it has found.
    `optional`: if it fails, the guest is as good without. `mounts`: it is the volumes. `not_yet`: the code that says that it is
    to be tried again later."""

    what: str
    argv: tuple[str, ...]
    remedies: dict[int, str]
    copies: bool = False
    optional: bool = False
    mounts: bool = False
    not_yet: int = 0


@dataclass(slots=True)
class GuestSetUp:
    """`agent_timeout`: seconds that a guest may take until its agent answers."""

    records: Records
    guests: GuestAgents
    volumes: PodVolumes
    copies: VolumeCopies
    clock: Clock
    agent_timeout: Live[float]
    locks: PodLocks
    _threads: ContainerThreads = field(default_factory=lambda: ContainerThreads("set-up"))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: set[ContainerId] = field(default_factory=set)
    _restarts: dict[ContainerId, int] = field(default_factory=dict)
    _session_threads: ContainerThreads = field(default_factory=lambda: ContainerThreads("session-set-up"))
    _awaited: dict[ContainerId, Future[ShimError | None]] = field(default_factory=dict)

    def make(self, container: Container, timeout: float, cancelled: threading.Event, within: float = 60.0) -> None:
        """All of it is there, copies as they are on the node now; what is known to be there, and does not change, is not made
        again. `timeout` and `within` as those of `GuestAgents.run`. DeadlineExceeded, Unavailable and Aborted: to be tried
        again; NotSetUp; another ShimError: it cannot be known."""
        faults, waiting = [], ""
        copied: tuple[str, ...] = ()
        unmounted = False
        with self._lock:
            is_made, restarts = container.id in self._made, self._restarts.get(container.id, 0)
        for part in self._parts(container):
            if is_made and not part.copies:
                continue

            def run(command: GuestCommand) -> CommandResult:
                return self.guests.run(container.id, command, timeout, cancelled, within)

            done = self._copied(container, run, part) if part.copies else run(GuestCommand(part.argv))
            if done.code == guest_script.BUSY:
                raise Unavailable(f"{part.what} in the guest yet: another run of the script goes on")
            if part.copies and not done.code:
                copied = paths_of(container.spec.copies, guest_script.had(done.stdout))
            unmounted |= part.mounts and done.code != 0
            if done.code and done.code == part.not_yet:
                waiting = _told(part, done)
            elif done.code and not part.optional:
                faults.append(_told(part, done))
        self._tell(container.id, copied, unmounted=unmounted)
        if faults:
            raise NotSetUp("; ".join(faults))
        if waiting:
            raise _NotYet(waiting)
        self._made_all(container, restarts)

    def _made_all(self, container: Container, restarts: int) -> None:
        """`restarts`: how often its guest had been restarted when that began."""
        self.volumes.note(container, "")
        running = {one.id for one in self.records.containers.all() if one.is_running}
        with self._lock:
            if restarts == self._restarts.get(container.id, 0):  # else it was another boot, or may have been
                self._made.add(container.id)
            self._made &= running
            self._restarts = {one: count for one, count in self._restarts.items() if one in running}

    def _copied(self, container: Container, run: Callable[[GuestCommand], CommandResult], part: _Part) -> CommandResult:
        """What the guest does not have is given to it."""
        boot, now = self.copies.boot(container.id), self.copies.now(container)
        known = self.copies.known(container.id)
        # Of a guest of which nothing is known the seed may have brought what is mounted.
        stale = [] if known is None and not part.optional else self.copies.stale(container, now, known or {})
        done = run(_copying(container, stale))
        # What it says itself counts: of a guest that was restarted nothing is known, or what is known is wrong.
        again = self.copies.stale(container, now, guest_script.digests(done.stdout))
        if again and done.code != guest_script.BUSY:
            stale = again
            done = run(_copying(container, stale))
        if not done.code or part.optional:
            self.copies.settle(container.id, now, boot)
            if stale:
                log.info("volumes.copied", container=container.id.short, volumes=len(stale))
        return done

    def before_command(self, container: Container, timeout: float, cancelled: threading.Event, within: float) -> float:
        """So that a command of somebody else's finds what is to be there, if the guest can have it. What is left of `timeout`,
        which is as that of `GuestAgents.run`."""
        if container.id in self._made or not self._parts(container):
            return timeout
        began = self.clock.monotonic()
        with contextlib.suppress(
            NotSetUp, _NotYet
        ):  # told where the container's state is, and commands may look into it
            self.make(container, timeout, cancelled, within)
        return max(0.001, timeout - (self.clock.monotonic() - began)) if timeout else timeout

    def before_session(self, container: Container) -> Future[ShimError | None]:
        """As `before_command`, for one that somebody streams: returns at once, and one run serves all that wait.
        The error: why no command can be run now."""
        going: Future[ShimError | None] = Future()
        if container.id in self._made or not self._parts(container):
            going.set_result(None)
            return going
        with self._lock:
            if (earlier := self._awaited.get(container.id)) is not None:
                return earlier
            self._awaited[container.id] = going
        try:
            self._session_threads.start(container.id, lambda: self._for_sessions(container, going), beside_earlier=True)
        except BaseException as exc:  # those that have joined meanwhile are told, and the next one begins anew
            with self._lock:
                self._awaited.pop(container.id, None)
            going.set_result(Unavailable(f"the guest cannot be set up now: {exc}"))
            raise
        return going

    def follow(self, container: Container, *, again: bool = False) -> None:
        """It is set up as soon as the guest can do it. `again`: also if that is being done, and has not seen a restart of the
        guest. Returns at once. A container whose command has not begun is left to whoever begins that."""
        renewed = container.status.command_begun and container.spec.copies
        if (not container.spec.command or renewed) and self._parts(container):
            self._threads.start(container.id, lambda: self._follow(container.id), again=again)

    def renew(self, container: Container) -> bool:
        """The copies are as they are on the node now, and nothing more is to be done; otherwise that is begun, and to be asked
        for again."""
        if self.copies.is_settled(container, self.copies.now(container)):
            return True
        self.follow(container)
        return False

    def changed(self, domain: uuid.UUID) -> None:
        """Something has happened to this domain: its guest may have been restarted, or ended."""
        for container in self.records.containers.all():
            if container.domain_uuid == domain:
                with self._lock:
                    self._made.discard(container.id)
                    self._restarts[container.id] = self._restarts.get(container.id, 0) + 1
                self.copies.forget(container.id)
                if container.is_running:
                    self.follow(container, again=True)

    def close(self) -> None:
        for threads in (self._threads, self._session_threads):
            threads.close()

    def _parts(self, container: Container) -> tuple[_Part, ...]:
        return tuple(self._each_part(container))

    def _each_part(self, container: Container) -> Iterator[_Part]:
        sandbox = self.records.sandboxes.get(container.sandbox_id)
        if sandbox is not None and sandbox.config.sysctls:
            remedy = "correct securityContext.sysctls, or use an image whose kernel has them"
            yield _Part(
                "securityContext.sysctls cannot be set",
                sysctls.command(sandbox.config.sysctls),
                {sysctls.NOT_SET: remedy},
            )
        if mount := empty_disks.command(container.spec.empty_disks):
            remedy = "use another path, or an image with mkfs.ext4"
            yield _Part("the empty disks cannot be mounted", mount, {empty_disks.NOT_MOUNTED: remedy})
        if container.granted.data_volumes:
            yield _Part(
                "block volumes cannot be linked to their paths",
                guest_links.command(container.granted.data_volumes),
                {guest_links.NOT_LINKED: "use another devicePath, or an image whose kernel has the driver"},
            )
        spec = container.spec
        mounted = spec.volumes or spec.memory_volumes
        if mounted or spec.copies:
            yield _Part(
                "the volumes cannot be mounted",
                guest_script.command(spec.volumes, spec.copies, memory=spec.memory_volumes),
                {
                    guest_script.NO_MODULE: "use an image with that module",
                    guest_script.NOT_MOUNTED: "see the guest's console",
                },
                bool(spec.copies),
                not mounted and not _mounted_copies(container),
                mounts=True,
            )
        # Last: it may have to wait for the guest's network, for which nothing else waits.
        if sandbox is not None and (routes := policy_routes.command(nics_of(sandbox.network, container.granted))):
            unfit = "use an image with iproute2, whose kernel has policy routing"
            yield _Part(
                "policy routes (CNI's sbr) cannot be set",
                routes,
                {
                    policy_routes.NO_COMMAND: unfit,
                    policy_routes.NOT_SET: unfit,
                    policy_routes.NOT_YET: "see whether the guest has configured its NICs",
                },
                not_yet=policy_routes.NOT_YET,
            )

    # --- below: a thread of each container

    def _for_sessions(self, container: Container, going: Future[ShimError | None]) -> None:
        why: ShimError | None = None
        try:
            self.before_command(container, 0.0, self._session_threads.closing, _SLICE)
        except ShimError as exc:
            why = exc
        finally:
            with self._lock:
                self._awaited.pop(container.id, None)
            going.set_result(why)

    def _follow(self, wanted: ContainerId) -> None:
        until = self.clock.monotonic() + self.agent_timeout.now
        if self._is_set_up(wanted):
            return
        while not self._threads.closing.is_set() and (container := self._running(wanted)) is not None:
            try:
                self.make(container, _SLICE, self._threads.closing)
            except NotSetUp as exc:
                log.warning("guest.not_set_up", container=wanted.short, error=str(exc))
                self.volumes.note(container, str(exc))
                self._give_up(container)
                return
            except ShimError as exc:
                passes = isinstance(exc, DeadlineExceeded | Unavailable | Aborted)
                if not passes or self.clock.monotonic() >= until:
                    # cloud-init may have done it; of a guest that says nothing nothing is known.
                    log.info("guest.set_up_unconfirmed", container=wanted.short, why=str(exc))
                    if wanted in self._made:
                        self.volumes.note(container, f"{_COPIED} are in the guest, and are not renewed: {exc}")
                    else:
                        self.volumes.note(container, self._unconfirmed(container, exc))
                        self._tell(wanted, ())
                    self._give_up(container)
                    return
                self.clock.wait(self._threads.closing, _AGAIN)
            else:
                if wanted not in self._made:
                    continue
                volumes = sum(map(len, (container.spec.volumes, container.spec.copies, container.spec.memory_volumes)))
                log.info("guest.set_up", container=wanted.short, volumes=volumes)
                return

    def _is_set_up(self, wanted: ContainerId) -> bool:
        """Whoever ran before this has seen the restart, too."""
        container = self._running(wanted)
        if container is None or wanted not in self._made:
            return False
        return self.copies.is_settled(container, self.copies.now(container))

    def _unconfirmed(self, container: Container, why: ShimError) -> str:
        """For the container's message: what nobody knows to be in the guest; "" if it is as good as there."""
        if isinstance(why, _NotYet):
            return str(why)
        routes = any(part.not_yet for part in self._parts(container))
        told = (_unconfirmed(container, why), _UNROUTED.format(why=why) if routes else "")
        return "; ".join(filter(None, told))

    def _give_up(self, container: Container) -> None:
        """On copies, until kubelet has written anew or the guest was restarted."""
        self.copies.settle(container.id, self.copies.now(container), self.copies.boot(container.id))

    def _tell(self, wanted: ContainerId, copied: tuple[str, ...], *, unmounted: bool = False) -> None:
        """What the status says that the guest has; written on change only."""
        found = self.records.containers.get(wanted)
        if found is None or (found.status.copied, found.status.unmounted) == (copied, unmounted):
            return
        with self.locks.held(found.sandbox_id):
            if (container := self._running(wanted)) is not None:
                self.records.containers.replace(with_told(container, copied, unmounted=unmounted))

    def _running(self, wanted: ContainerId) -> Container | None:
        found = self.records.containers.get(wanted)
        return found if found is not None and found.is_running else None


def _told(part: _Part, done: CommandResult) -> str:
    said = escaped(done.stderr.decode(errors="replace").strip().replace("\n", "; "), _MOST_TOLD)
    remedy = part.remedies.get(done.code, "")
    return f"{part.what} in the guest: {said or f'the script ended with {done.code}'}" + (remedy and f"; {remedy}")


def _unconfirmed(container: Container, why: ShimError) -> str:
    """Of its volumes; "" if they are as good as there."""
    spec = container.spec
    copies = _mounted_copies(container)
    if isinstance(why, WrongState):  # an agent that refuses: of what does not change, cloud-init's word is enough
        return f"{_REFUSED}: {why}" if copies else ""
    if copies:
        return _UNHEARD.format(what=f"{_COPIED} are", renewed=", and are not renewed")
    return _UNHEARD.format(what="its volumes are", renewed="") if spec.volumes or spec.memory_volumes else ""


def _mounted_copies(container: Container) -> bool:
    """Whether there are others than the hosts file."""
    return any(not volume.written for volume in container.spec.copies)


def _copying(container: Container, stale: Sequence[Packed]) -> GuestCommand:
    """The script that puts the volumes in their places, and these copies, if there are any."""
    source = guest_script.Copies.INPUT if stale else guest_script.Copies.AS_THEY_ARE
    spec = container.spec
    script = guest_script.command(spec.volumes, spec.copies, source, spec.memory_volumes)
    return GuestCommand(script, input=archive(stale) if stale else b"")
