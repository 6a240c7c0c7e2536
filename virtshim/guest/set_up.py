"""Sets up a guest before anything of its container runs in it: the pod's sysctls, its disks and volumes, and policy
routes.

cloud-init does most of it while the guest boots. The guest agent does what cloud-init has not done, and renews copies
of volumes that kubelet has changed. Only the agent sets policy routes.
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

from virtshim.containers.record_exit import ExitRecorder
from virtshim.devices.guest_view import GUEST_LINKS_NOT_LINKED, guest_links_command
from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.guest.ports import GuestAgents
from virtshim.guest.set_up_scripts import (
    ADDRESSES_NOT_SET,
    NO_IP_COMMAND,
    POLICY_ROUTES_NOT_SET,
    POLICY_ROUTES_NOT_YET,
    SYSCTLS_NOT_SET,
    addresses_command,
    policy_routes_command,
    sysctls_command,
)
from virtshim.model.container import Container, Exit, ExitReason
from virtshim.model.errors import Aborted, DeadlineExceeded, ShimError, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.network import nics_of
from virtshim.model.sandbox import Sandbox
from virtshim.model.text import escaped
from virtshim.model.troubles import Trouble, TroubleKind, merged, text_of_troubles
from virtshim.pods.lookup import running
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.system.locks import PodLocks, new_lock
from virtshim.system.threads import ContainerThreads
from virtshim.volumes import empty_disks, mount_script
from virtshim.volumes.copies import SHARED_ANNOTATION, Packed, archive, paths_of
from virtshim.volumes.pod_mounts import has_writable, with_told
from virtshim.volumes.pod_volumes import PodVolumes

log = structlog.get_logger(__name__)

# Seconds: one wait for the agent and the scripts, and the pause before the next.
_SLICE: Final = 60.0
_AGAIN: Final = 2.0
_MOST_TOLD: Final = 500

_COPIED: Final = "its configMap, secret, downwardAPI and projected volumes, including the service account token,"
_REFUSED: Final = (
    f"{_COPIED} are in the guest only if its image has cloud-init, and are not renewed after the VM's creation (annotation "
    f"{SHARED_ANNOTATION}: shared provides them by virtiofs)"
)
_UNHEARD: Final = (
    "no guest agent has answered: {what} in the guest only if its image has cloud-init{renewed}; install qemu-guest-agent in the "
    "image"
)


_UNROUTED: Final = (
    "policy routes (CNI's sbr) are not set in the guest: {why}; use an image whose guest agent may run commands"
)


class NotSetUp(WrongState):
    """The guest cannot have a part, and says why. `lost`: a writable volume or an empty disk is not mounted, so the
    guest's writes to its path go to the root disk. `doubtful`: it is unknown whether they are mounted."""

    def __init__(self, troubles: tuple[Trouble, ...], *, lost: bool = False, doubtful: bool = False) -> None:
        super().__init__(text_of_troubles(troubles))
        self.troubles = troubles
        self.lost = lost
        self.doubtful = doubtful


class _NotYet(Unavailable):
    """The guest's network is not ready; everything else is set up."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.text)
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class _Part:
    """`kind`: of the trouble if the part fails. `remedies`: by the script's exit code, for known causes. `copies`:
    whether the script lists the copies it found. `optional`: whether the guest works as well without it. `mounts`:
    whether it mounts the volumes. `not_yet`: the exit code that asks for another try later."""

    kind: TroubleKind
    what: str
    argv: tuple[str, ...]
    remedies: dict[int, str]
    copies: bool = False
    optional: bool = False
    mounts: bool = False
    not_yet: int = 0


@dataclass(slots=True)
class _Outcome:
    """The result of the parts that were run. `confirmed`: whether each mount has succeeded."""

    faults: list[Trouble] = field(default_factory=list)
    waiting: Trouble | None = None
    copied: tuple[str, ...] = ()
    unmounted: bool = False
    confirmed: bool = True
    lost: bool = False
    doubtful: bool = False


@dataclass(slots=True)
class GuestSetUp:
    """`agent_timeout`: seconds until the guest's agent must answer. `must_confirm`: a container ends if its guest has
    not confirmed by then that the writable volumes are mounted."""

    records: Records
    clock: Clock
    locks: PodLocks
    guests: GuestAgents
    volumes: PodVolumes
    exits: ExitRecorder
    agent_timeout: Live[float]
    must_confirm: Live[bool]
    _on_end: Callable[[Container], None] = lambda _container: None
    _threads: ContainerThreads = field(default_factory=lambda: ContainerThreads("set-up"))
    _lock: threading.Lock = field(default_factory=new_lock)
    _made: set[ContainerId] = field(default_factory=set)
    _restarts: dict[ContainerId, int] = field(default_factory=dict)
    _session_threads: ContainerThreads = field(default_factory=lambda: ContainerThreads("session-set-up"))
    _awaited: dict[ContainerId, Future[ShimError | None]] = field(default_factory=dict)
    # Containers whose guests may have been restarted. No thread could be started to set them up again.
    _pending: set[ContainerId] = field(default_factory=set)

    def make(self, container: Container, timeout: float, cancelled: threading.Event, within: float = 60.0) -> None:
        """Sets up everything, with copies as they are on the node now. Skips steps that are known to be done and that
        cannot change. `timeout` and `within` are those of `GuestAgents.run`. DeadlineExceeded, Unavailable and Aborted
        ask for another try; NotSetUp is final; any other ShimError means that the result is unknown."""
        outcome = _Outcome()
        with self._lock:
            is_made, restarts = container.id in self._made, self._restarts.get(container.id, 0)
        for part in self._parts(container):
            if is_made and not part.copies:
                continue

            def run(command: GuestCommand) -> CommandResult:
                return self.guests.run(container.id, command, timeout, cancelled, within)

            done = self._copied(container, run, part) if part.copies else run(GuestCommand(part.argv))
            if done.code == mount_script.BUSY:
                raise Unavailable(f"{part.what} in the guest yet, because another run of the script is under way")
            _note(outcome, container, part, done)
        self._tell(
            container.id,
            outcome.copied,
            unmounted=outcome.unmounted,
            confirmed=outcome.confirmed and has_writable(container),
        )
        if outcome.faults:
            raise NotSetUp(tuple(outcome.faults), lost=outcome.lost, doubtful=outcome.doubtful)
        if outcome.waiting is not None:
            raise _NotYet(outcome.waiting)
        self._made_all(container, restarts)

    def _made_all(self, container: Container, restarts: int) -> None:
        """`restarts`: how often its guest had restarted when the set-up began."""
        self.volumes.note(container, ())
        there = {one.id for one in self.records.containers.all() if one.is_running}
        with self._lock:
            if restarts == self._restarts.get(container.id, 0):  # otherwise it may have been another boot
                self._made.add(container.id)
            self._made &= there
            self._restarts = {one: count for one, count in self._restarts.items() if one in there}

    def _copied(self, container: Container, run: Callable[[GuestCommand], CommandResult], part: _Part) -> CommandResult:
        """Gives the guest the copies that it lacks."""
        boot, now = self.volumes.copies.boot(container.id), self.volumes.copies.now(container)
        known = self.volumes.copies.known(container.id)
        # Of a guest of which nothing is known the seed may have brought what is mounted.
        stale = [] if known is None and not part.optional else self.volumes.copies.stale(container, now, known or {})
        done = run(_copying(container, stale))
        # The guest's own answer counts: if the guest was restarted, virtshim knows nothing of it, or something wrong.
        again = self.volumes.copies.stale(container, now, mount_script.digests(done.stdout))
        if again and done.code != mount_script.BUSY:
            stale = again
            done = run(_copying(container, stale))
        if not done.code or part.optional:
            self.volumes.copies.settle(container.id, now, boot)
            if stale:
                log.info("volumes.copied", container=container.id.short, volumes=len(stale))
        return done

    def before_command(self, container: Container, timeout: float, cancelled: threading.Event, within: float) -> float:
        """Sets up the guest, as far as it can, before a command runs. `timeout`: as for `GuestAgents.run`; returns the
        rest of it."""
        if container.id in self._made or not self._parts(container):
            return timeout
        began = self.clock.monotonic()
        with contextlib.suppress(_NotYet):  # the status reports it, and the command may be there to find the cause
            try:
                self.make(container, timeout, cancelled, within)
            except NotSetUp as exc:
                if not container.spec.command:  # otherwise the command's own thread reports it
                    self._not_set_up(container, exc)
        return max(0.001, timeout - (self.clock.monotonic() - began)) if timeout else timeout

    def before_session(self, container: Container) -> Future[ShimError | None]:
        """Like `before_command`, for a command that streams. Returns at once, and one run serves all callers that wait.
        The result is the error that prevents commands now, or None."""
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
        except BaseException as exc:  # all waiting callers get the error, and the next one starts again
            with self._lock:
                self._awaited.pop(container.id, None)
            going.set_result(Unavailable(f"the guest cannot be set up now: {exc}"))
            raise
        return going

    def follow(self, container: Container, *, again: bool = False) -> None:
        """Sets up the guest as soon as it can be. `again`: also if a set-up is running, which has not seen a restart of
        the guest. Returns at once. If the container's command has not started, the thread that starts it does this."""
        renewed = container.status.command_begun and (container.spec.copies or container.status.known_as is not None)
        if (not container.spec.command or renewed) and self._parts(container):
            self._threads.start(container.id, lambda: self._follow(container.id), again=again)

    def renew(self, container: Container) -> bool:
        """Whether the copies are as on the node now and nothing is left to do. If not, starts the set-up; the caller
        asks again later."""
        if self.volumes.copies.is_settled(container, self.volumes.copies.now(container)):
            return True
        self.follow(container)
        return False

    def changed(self, domain: uuid.UUID) -> None:
        """Called after an event of this domain: its guest may have restarted or ended."""
        for container in self.records.containers.all():
            if container.domain_uuid == domain:
                with self._lock:
                    self._made.discard(container.id)
                    self._restarts[container.id] = self._restarts.get(container.id, 0) + 1
                self.volumes.copies.forget(container.id)
                if container.is_running:
                    self._follow_or_owe(container)

    def look(self) -> None:
        """Begins the set-ups for which no thread could be started earlier."""
        with self._lock:
            pending, self._pending = self._pending, set()
        for wanted in pending:
            if (container := running(self.records, wanted)) is not None:
                self._follow_or_owe(container)

    def _follow_or_owe(self, container: Container) -> None:
        try:
            self.follow(container, again=True)
        except RuntimeError as exc:
            log.warning("guest.set_up_waits", container=container.id.short, error=str(exc))
            with self._lock:
                self._pending.add(container.id)

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
                TroubleKind.SYSCTLS_NOT_SET,
                "securityContext.sysctls cannot be set",
                sysctls_command(sandbox.config.sysctls),
                {SYSCTLS_NOT_SET: remedy},
            )
        if sandbox is not None and _needs_addresses(container, sandbox):
            there = nics_of(sandbox.network, container.granted)
            if set_addresses := addresses_command(there):
                unfit = "use an image with iproute2 or busybox's ip, or wait until its DHCP client asks again"
                yield _Part(
                    TroubleKind.ADDRESSES_NOT_SET,
                    "the pod's addresses cannot be set in the guest",
                    set_addresses,
                    {NO_IP_COMMAND: unfit, ADDRESSES_NOT_SET: unfit},
                )
        if mount := empty_disks.command(container.spec.empty_disks):
            remedy = "use another path, or an image with mkfs.ext4"
            kind = TroubleKind.EMPTY_DISKS_NOT_MOUNTED
            yield _Part(kind, "the empty disks cannot be mounted", mount, {empty_disks.NOT_MOUNTED: remedy})
        if container.granted.data_volumes:
            yield _Part(
                TroubleKind.BLOCK_VOLUMES_NOT_LINKED,
                "block volumes cannot be linked to their paths",
                guest_links_command(container.granted.data_volumes),
                {GUEST_LINKS_NOT_LINKED: "use another devicePath, or an image whose kernel has the driver"},
            )
        spec = container.spec
        mounted = spec.volumes or spec.memory_volumes
        if mounted or spec.copies:
            yield _Part(
                TroubleKind.VOLUMES_NOT_MOUNTED,
                "the volumes cannot be mounted",
                mount_script.command(spec.volumes, spec.copies, memory=spec.memory_volumes),
                {
                    mount_script.NO_MODULE: "use an image with that module",
                    mount_script.NOT_MOUNTED: "see the guest's console",
                },
                bool(spec.copies),
                not mounted and not _mounted_copies(container),
                mounts=True,
            )
        # Last, because it may wait for the guest's network, and nothing else does.
        if sandbox is not None and (routes := policy_routes_command(nics_of(sandbox.network, container.granted))):
            unfit = "use an image with iproute2, whose kernel has policy routing"
            yield _Part(
                TroubleKind.ROUTES_NOT_SET,
                "policy routes (CNI's sbr) cannot be set",
                routes,
                {
                    NO_IP_COMMAND: unfit,
                    POLICY_ROUTES_NOT_SET: unfit,
                    POLICY_ROUTES_NOT_YET: "see whether the guest has configured its NICs",
                },
                not_yet=POLICY_ROUTES_NOT_YET,
            )

    # --- below: the thread of one container

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
        while not self._threads.closing.is_set() and (container := running(self.records, wanted)) is not None:
            if _stands_still(container):
                until += self._rest()
                continue
            try:
                self.make(container, _SLICE, self._threads.closing)
            except NotSetUp as exc:
                log.warning("guest.not_set_up", container=wanted.short, error=str(exc))
                self._not_set_up(container, exc)
                self._give_up(container)
                return
            except ShimError as exc:
                now = running(self.records, wanted)
                if self._threads.closing.is_set() or now is None or _stands_still(now):
                    continue
                passes = isinstance(exc, DeadlineExceeded | Unavailable | Aborted)
                if not passes or self.clock.monotonic() >= until:
                    log.info("guest.set_up_unconfirmed", container=wanted.short, why=str(exc))
                    self._unheard(now, exc)
                    self._give_up(container)
                    return
                self._rest()
            else:
                if wanted not in self._made:
                    continue
                volumes = sum(map(len, (container.spec.volumes, container.spec.copies, container.spec.memory_volumes)))
                log.info("guest.set_up", container=wanted.short, volumes=volumes)
                return

    def _rest(self) -> float:
        """Waits a moment. Returns how many seconds it waited."""
        began = self.clock.monotonic()
        self.clock.wait(self._threads.closing, _AGAIN)
        return self.clock.monotonic() - began

    def _not_set_up(self, container: Container, why: NotSetUp) -> None:
        """Ends a container that lacks a writable volume, because its data would be lost with its root disk."""
        self.volumes.note(container, why.troubles)
        if why.lost or (why.doubtful and self.must_confirm.now):
            self._end(container, why.troubles)

    def _unheard(self, container: Container, why: ShimError) -> None:
        """Handles a guest that does not answer. cloud-init may have done the set-up, but nothing is known."""
        if container.id in self._made:
            text = f"{_COPIED} are in the guest, but are not renewed: {why}"
            self.volumes.note(container, (Trouble(TroubleKind.COPIES_NOT_RENEWED, text),))
            return
        self._tell(container.id, ())
        troubles = self._unconfirmed(container, why)
        never = has_writable(container) and not container.status.mounts_confirmed
        if not self.must_confirm.now or isinstance(why, _NotYet) or not never:
            self.volumes.note(container, troubles)
            return
        text = f"the guest has not confirmed that its writable volumes are mounted (volumes.unconfirmed: fail): {why}"
        unconfirmed = (Trouble(TroubleKind.VOLUMES_UNCONFIRMED, text),)
        self.volumes.note(container, merged(troubles, unconfirmed))
        self._end(container, unconfirmed)

    def _end(self, container: Container, why: tuple[Trouble, ...]) -> None:
        """Shuts down its VM, unless it is ending anyway. kubelet's next attempt gets a new VM."""
        found = running(self.records, container.id)
        if found is None or found.status.stop_asked or found.status.ending is not None:
            return
        log.warning("guest.volumes_lost", container=container.id.short, error=text_of_troubles(why))
        how = Exit(128, ExitReason.ERROR, self.clock.now_ns(), text_of_troubles(why))
        if (ending := self.exits.begin_end(container.id, how, why)) is not None:
            self._on_end(ending)

    def on_end(self, callback: Callable[[Container], None]) -> None:
        """`callback` gets each container whose record says from now on how it ends, and must end its VM."""
        self._on_end = callback

    def _is_set_up(self, wanted: ContainerId) -> bool:
        """Whether the set-up is done and the copies are up to date."""
        container = running(self.records, wanted)
        if container is None or wanted not in self._made:
            return False
        return self.volumes.copies.is_settled(container, self.volumes.copies.now(container))

    def _unconfirmed(self, container: Container, why: ShimError) -> tuple[Trouble, ...]:
        """Troubles for the parts that may be missing in the guest; none if all are as good as done."""
        if isinstance(why, _NotYet):
            return (why.trouble,)
        routes = any(part.not_yet for part in self._parts(container))
        unrouted = (Trouble(TroubleKind.ROUTES_NOT_SET, _UNROUTED.format(why=why)),) if routes else ()
        return (*_unconfirmed(container, why), *unrouted)

    def _give_up(self, container: Container) -> None:
        """Stops sending the copies until kubelet changes them or the guest restarts."""
        self.volumes.copies.settle(
            container.id, self.volumes.copies.now(container), self.volumes.copies.boot(container.id)
        )

    def _tell(
        self, wanted: ContainerId, copied: tuple[str, ...], *, unmounted: bool = False, confirmed: bool = False
    ) -> None:
        """Records what the guest has for the status; written on change only."""

        def told(container: Container) -> Container:
            return with_told(container, copied, unmounted=unmounted, confirmed=confirmed)

        found = self.records.containers.get(wanted)
        if found is None or told(found) == found:
            return
        with self.locks.held(found.sandbox_id):
            if (container := running(self.records, wanted)) is not None:
                self.records.containers.replace(told(container))


def _told(part: _Part, done: CommandResult) -> str:
    said = escaped(done.stderr.decode(errors="replace").strip().replace("\n", "; "), _MOST_TOLD)
    remedy = part.remedies.get(done.code, "")
    return f"{part.what} in the guest: {said or f'the script ended with {done.code}'}" + (remedy and f"; {remedy}")


def _note(outcome: _Outcome, container: Container, part: _Part, done: CommandResult) -> None:
    """Adds the result of one part's script to the outcome."""
    if part.copies and not done.code:
        outcome.copied = paths_of(container.spec.copies, mount_script.had(done.stdout))
    if not done.code:
        return
    trouble = Trouble(part.kind, _told(part, done))
    if done.code == part.not_yet:
        outcome.waiting = trouble
        return
    if part.mounts:
        outcome.unmounted = True
        spec = container.spec
        missing = mount_script.not_mounted(spec.volumes, spec.memory_volumes, done.code, done.stdout)
        outcome.lost |= any(not volume.readonly for volume in missing or ())
        outcome.doubtful |= missing is None and has_writable(container)
        outcome.confirmed &= missing == []
    elif part.kind is TroubleKind.EMPTY_DISKS_NOT_MOUNTED:
        known = done.code == empty_disks.NOT_MOUNTED
        outcome.lost, outcome.doubtful = outcome.lost or known, outcome.doubtful or not known
        outcome.confirmed = False
    if not part.optional:
        outcome.faults.append(trouble)


def _needs_addresses(container: Container, sandbox: Sandbox) -> bool:
    """Whether the guest may not have the pod's addresses: one that was restored, and one with IPv6 behind passt, which sends
    no router advertisements."""
    has_ipv6 = sandbox.network is not None and any(":" in ip for ip in sandbox.network.ips)
    return container.status.known_as is not None or (container.spec.passt_uid != 0 and has_ipv6)


def _stands_still(container: Container) -> bool:
    """Whether its guest cannot answer, with or without an agent."""
    return container.status.paused or any(one.kind.stops_the_vm for one in container.status.troubles)


def _unconfirmed(container: Container, why: ShimError) -> tuple[Trouble, ...]:
    """The troubles with its volumes; none if they are as good as mounted."""
    spec = container.spec
    copies = _mounted_copies(container)
    if isinstance(why, WrongState):  # the agent refuses: cloud-init is trusted for volumes that do not change
        return (Trouble(TroubleKind.COPIES_NOT_RENEWED, f"{_REFUSED}: {why}"),) if copies else ()
    unconfirmed = TroubleKind.VOLUMES_UNCONFIRMED
    if copies:
        return (Trouble(unconfirmed, _UNHEARD.format(what=f"{_COPIED} are", renewed=", and are not renewed")),)
    if spec.volumes or spec.memory_volumes:
        return (Trouble(unconfirmed, _UNHEARD.format(what="its volumes are", renewed="")),)
    return ()


def _mounted_copies(container: Container) -> bool:
    """Whether there are copies other than the hosts file."""
    return any(not volume.written for volume in container.spec.copies)


def _copying(container: Container, stale: Sequence[Packed]) -> GuestCommand:
    """The script that mounts the volumes and unpacks these copies, if there are any."""
    source = mount_script.Copies.INPUT if stale else mount_script.Copies.AS_THEY_ARE
    spec = container.spec
    script = mount_script.command(spec.volumes, spec.copies, source, spec.memory_volumes)
    return GuestCommand(script, input=archive(stale) if stale else b"")
