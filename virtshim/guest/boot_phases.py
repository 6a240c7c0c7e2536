"""How far guests have booted, and whether there is something in a guest to shut down."""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from dataclasses import dataclass, field
from typing import Final

from virtshim.logs.ports import BootOutput
from virtshim.metrics.start_ups import StartUps
from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.pods.lookup import running
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import new_lock
from virtshim.vm.ports import VmControl, VmReadings

# The phases, as the console and the agent show them: firmware, kernel, user space, cloud-init, agent.
#
# A guest that shows nothing (`quiet`, no serial console) has late phases or none; nothing depends on them.

FIRMWARE: Final = "firmware"
KERNEL: Final = "kernel"
USER_SPACE: Final = "user-space"
CLOUD_INIT: Final = "cloud-init"
AGENT: Final = "agent"

# Console text that marks the beginning of a phase: the kernel's first words, the first process's, and those of
# cloud-init's first stage. The guest writes the searched text, so each pattern must take only a few steps for each
# byte, whatever the text is.
_BEGINNINGS: Final = (
    (
        KERNEL,
        re.compile(
            rb"Linux version |^\[ *\d+\.\d{6}\]|EFI stub|Copyright \(c\) \d{4}-\d{4} The [^\n]{0,100}?BSD", re.MULTILINE
        ),
    ),
    (USER_SPACE, re.compile(rb"Run \S*init as init process|systemd\[1\]: |^Welcome to |^INIT: ", re.MULTILINE)),
    (CLOUD_INIT, re.compile(rb"Cloud-init v\. \S+ running 'init-local'")),
)
_ORDER: Final = (FIRMWARE, KERNEL, USER_SPACE, CLOUD_INIT)
_CLOUD_INIT_OVER: Final = re.compile(rb"Cloud-init v\. \S+ finished at")
_LOGIN: Final = re.compile(rb"^\S* ?login: ", re.MULTILINE)
# Bytes of a console that are searched. A boot writes fewer.
_MOST: Final = 1 << 20
# A line that is cut off may end with the beginning of a mark.
_OVERLAP: Final = 200
# Bytes of one read.
_PIECE: Final = 64 << 10
# Seconds between two looks for a guest's agent, at least; and the part of the guest's age that passes between two looks, so that
# a guest without an agent costs less and less.
_LOOK: Final = 1.0
_PART: Final = 8


@dataclass(slots=True)
class _Boot:
    """`read_to`: how many bytes of the console were searched. `last`: the end of these bytes. Only the reading thread
    uses these two fields. `now`: the current phase, of those that follow each other. `look_at`: the time of the next look for
    the agent, on the clock of `began`."""

    sandbox: SandboxId
    domain: uuid.UUID
    began: float
    look_at: float
    read_to: int = 0
    last: bytes = b""
    now: str = FIRMWARE
    is_through: bool = False
    has_agent: bool = False


@dataclass(frozen=True, slots=True)
class _Shown:
    """The marks in a piece of a console. `begun`: the phases that begin in it, in order."""

    begun: tuple[str, ...]
    is_cloud_init_over: bool
    is_login: bool

    @classmethod
    def seen_in(cls, seen: bytes) -> _Shown:
        begun = tuple(name for name, mark in _BEGINNINGS if mark.search(seen))
        return cls(begun, bool(_CLOUD_INIT_OVER.search(seen)), bool(_LOGIN.search(seen)))


@dataclass(slots=True)
class BootPhases:
    """Thread-safe. Each call does a bounded amount of work."""

    records: Records
    clock: Clock
    output: BootOutput
    control: VmControl
    start_ups: StartUps
    _lock: threading.Lock = field(default_factory=new_lock)
    _boots: dict[ContainerId, _Boot] = field(default_factory=dict)

    def began(self, container: Container) -> None:
        """Called when the container's QEMU has started."""
        with self._lock:
            self._boots = {known: boot for known, boot in self._boots.items() if running(self.records, known)}
            now = self.clock.monotonic()
            self._boots[container.id] = _Boot(container.sandbox_id, container.domain_uuid, now, now + _LOOK)
        self.start_ups.begin(FIRMWARE, container.sandbox_id, container.id)
        self.start_ups.begin(AGENT, container.sandbox_id, container.id)

    def run(self, stopping: threading.Event) -> None:
        """Looks for agents until `stopping` is set."""
        while not self.clock.wait(stopping, _LOOK):
            self.look()

    def look(self) -> None:
        """Looks for the agents of guests that boot, because nobody may ever ask them anything."""
        now = self.clock.monotonic()
        with self._lock:
            due = [boot for boot in self._boots.values() if not boot.has_agent and boot.look_at <= now]
            for boot in due:
                boot.look_at = now + max(_LOOK, (now - boot.began) / _PART)
        for boot in due:
            with contextlib.suppress(ShimError):  # the VM has just ended, or libvirt does not answer
                self.control.look_for_agent(boot.domain)

    def console_changed(self, container: ContainerId) -> None:
        """Called when the container's console may have new output, by one thread at a time. Reads and searches without
        the lock, because other threads take the lock while they write a record."""
        with self._lock:
            boot = self._boots.get(container)
            if boot is None or boot.is_through:
                return
        try:
            piece = self.output.piece(container, boot.read_to, _PIECE)
        except ShimError:
            return
        if not piece:
            return
        boot.read_to += len(piece)
        seen, boot.last = boot.last + piece, (boot.last + piece)[-_OVERLAP:]
        shown = _Shown.seen_in(seen)
        with self._lock:
            if self._boots.get(container) is not boot or boot.is_through:
                return
            self._look(container, boot, shown)
            if boot.read_to >= _MOST:
                boot.is_through = True

    def agent_answers(self, domain: uuid.UUID) -> None:
        """Called when the guest has opened the agent's port."""
        with self._lock:
            for container, boot in self._boots.items():
                if boot.domain == domain and not boot.has_agent:
                    boot.has_agent = True
                    self.start_ups.end(AGENT, boot.sandbox, container)
                    self._over(container, boot, FIRMWARE, KERNEL)  # a console that shows nothing

    def record_changed(self, _before: Container | None, after: Container | None) -> None:
        """Called when the VM has ended, and ends all its phases."""
        if after is None or after.exit is None:
            return
        with self._lock:
            boot = self._boots.pop(after.id, None)
        if boot is not None:
            self.start_ups.end_all(boot.sandbox, after.id, "the VM ended")

    def _look(self, container: ContainerId, boot: _Boot, shown: _Shown) -> None:
        """The caller holds the lock."""
        for name in shown.begun:
            if _ORDER.index(name) > _ORDER.index(boot.now):
                if name is not CLOUD_INIT:  # cloud-init is a part of user space, which continues
                    self.start_ups.end(boot.now, boot.sandbox, container)
                boot.now = name
                self.start_ups.begin(name, boot.sandbox, container)
        if boot.now in (USER_SPACE, CLOUD_INIT) and shown.is_cloud_init_over:
            self._over(container, boot, CLOUD_INIT, USER_SPACE)
        elif boot.now not in (CLOUD_INIT, FIRMWARE) and shown.is_login:
            self._over(container, boot, KERNEL, USER_SPACE)

    def _over(self, container: ContainerId, boot: _Boot, *names: str) -> None:
        for name in names:
            self.start_ups.end(name, boot.sandbox, container)
        boot.is_through = boot.is_through or USER_SPACE in names


@dataclass(frozen=True, slots=True)
class Starts:
    """The phases of pods' starts: `ups` from virtshim's own steps, `boots` from the guests' consoles and agents."""

    ups: StartUps
    boots: BootPhases


# Nanoseconds. A guest that has run for longer may be one that shows nothing and writes to no disk.
_BOOTING: Final = 120 * 10**9


@dataclass(frozen=True, slots=True)
class BootProgress:
    readings: VmReadings
    console: BootOutput
    clock: Clock

    def is_before_kernel(self, container: Container) -> bool:
        """True if only firmware or a boot loader has run: it started recently, its console shows no kernel, and it has
        written to none of its disks. Such a guest ignores its power button and has nothing to lose. False in doubt, and
        for a VM with host devices, whose state is not visible here."""
        has_booted = container.status.known_as is not None or container.status.warm_started
        if has_booted or container.status.command_begun or container.granted.passthrough:
            return False
        age = self.clock.now_ns() - container.status.started_at
        if abs(age) > _BOOTING or self.console.shows_kernel(container.id):
            return False
        usage = self.readings.usage({container.domain_uuid: container.domain_name}).get(container.domain_uuid)
        if usage is None or usage.counters is None or not usage.counters.blocks:
            return False
        return not any(block.writes for block in usage.counters.blocks)
