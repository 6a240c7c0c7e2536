"""Makes templates in the background, one at a time, and keeps them while this process lives.

A template is a VM of the node, never of a pod: it boots the image without a seed, a network or volumes. When its guest agent
answers, virtshim keeps its memory, the state of its devices and its disk, and ends the VM. All three are files without names, so
nothing is left of them when virtshim ends. It then makes them again, because a file that outlives a process can be stale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.guest.ports import GuestAgents, GuestOperations
from virtshim.metrics.observed import WarmStart
from virtshim.model.container import Container
from virtshim.model.errors import DeadlineExceeded, ShimError, Unavailable, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.layout import Layout, directories_of
from virtshim.system.clock import Clock
from virtshim.system.live import Live
from virtshim.system.locks import PodLocks, new_lock
from virtshim.system.threads import lasting
from virtshim.templates.guest_identity import PROBE, RESEED, new_time_and_seed
from virtshim.templates.ports import TemplateFiles, TemplateVms
from virtshim.templates.values import Cold, Kept, Template, key_of, to_drop
from virtshim.vm.ports import Hypervisor, MemoryStreams, VmPausing
from virtshim.vm.streams import wait_for_stream
from virtshim.vm.warm_xml import TemplateNames, memory_bytes_in, template_xml, why_no_template

log = structlog.get_logger(__name__)

# Seconds for a guest that has booted to become quiet and give back the memory that it does not use.
_QUIET: Final = 3.0
# Seconds to write the state of the devices, and between two attempts to seal the memory.
_WRITTEN: Final = 60.0
_LOOK: Final = 0.02
# Seconds for the kernel to unmap the memory of a QEMU that has ended.
_UNMAPPED: Final = 5.0
# Seconds until another attempt, after one that failed for no reason of the guest's.
_AGAIN: Final = 600.0
# Seconds that an unused template is kept, and between two looks for such.
_UNUSED: Final = 86400.0
_REST: Final = 60.0
# Seconds until another attempt to end a template's VM.
_SOON: Final = 2.0
# Seconds for the thread to end.
_CLOSED: Final = 5.0
# Guests that wait for a template. More start cold and ask again.
_MOST_WANTED: Final = 16
# Machines without a template whose reasons are remembered.
_MOST_UNFIT: Final = 256

_NOBODY: Final = ContainerId("0" * 64)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """`disk`: a descriptor of a root disk that no guest has used. `image`: as the pod has named it."""

    key: str
    definition: str
    disk: int
    container: ContainerId
    image: str


@dataclass(slots=True)
class _Entry:
    template: Template
    used_at: float
    image: str


@dataclass(frozen=True, slots=True)
class _Unfit:
    """Why a machine has no template, and until when that holds; None: while this process lives."""

    image: str
    why: str
    until: float | None

    def holds_at(self, now: float) -> bool:
        return self.until is None or now < self.until


@dataclass(slots=True)
class Templates:
    """`most`: bytes that all templates may take; 0 allows none. `agent_timeout`: seconds until a template's agent must answer.
    `uid`: yields a user id that no other VM has, taken while something runs as it."""

    vms: TemplateVms
    files: TemplateFiles
    hypervisor: Hypervisor
    pausing: VmPausing
    streams: MemoryStreams
    guests: GuestOperations
    agents: GuestAgents
    clock: Clock
    locks: PodLocks
    layout: Layout
    uid: Callable[[], AbstractContextManager[int]]
    most: Live[int]
    agent_timeout: Live[float]
    _lock: threading.Lock = field(default_factory=new_lock)
    _kept: dict[str, _Entry] = field(default_factory=dict)
    _unfit: dict[str, _Unfit] = field(default_factory=dict)
    # None ends the thread.
    _wanted: queue.SimpleQueue[_Wanted | None] = field(default_factory=queue.SimpleQueue)
    _under_way: set[str] = field(default_factory=set)
    _thread: threading.Thread | None = None
    _closing: threading.Event = field(default_factory=threading.Event)
    _booting: tuple[uuid.UUID, ContainerId] | None = None
    # VMs of templates that are to end. Only the thread uses them.
    _to_end: list[tuple[uuid.UUID, ContainerId]] = field(default_factory=list)

    def key_for(self, container: Container, disk_bytes: int) -> tuple[str, str]:
        """The key of a template of this container's machine, and the machine's definition. Raises WrongState if there cannot be a
        template."""
        definition = self.vms.definition(container.domain_uuid, container.id)
        if why := why_no_template(definition):
            raise WrongState(why)
        names = self._names(container.id, _NOBODY, SandboxId("0" * 64), 0)
        return key_of(definition, names, disk_bytes, self.vms.qemu()), definition

    @contextlib.contextmanager
    def of(self, key: str) -> Iterator[Template | None]:
        """The template, whose descriptors stay open in the block; None if there is none."""
        with contextlib.ExitStack() as closing:
            with self._lock:
                entry = self._kept.get(key)
                if entry is None or not self.most.now:
                    found = None
                else:
                    entry.used_at = self.clock.monotonic()
                    found = _duplicate(entry.template, closing)
            yield found

    def want(self, key: str, definition: str, container: Container, disk: int) -> Cold:
        """Begins to make a template, unless that is under way or useless. Takes a duplicate of `disk`, which no guest has used.
        Returns why there is none yet."""
        with self._lock:
            unfit = self._unfit.get(key)
            if unfit is not None and unfit.holds_at(self.clock.monotonic()):
                return Cold(WarmStart.UNFIT, unfit.why)
            if key in self._under_way:
                return Cold(WarmStart.NO_TEMPLATE, "its template is being made")
            if self._closing.is_set() or len(self._under_way) >= _MOST_WANTED:
                return Cold(WarmStart.NO_TEMPLATE, "other templates are being made")
            try:
                if self._thread is None:
                    self._thread = lasting(self._run, "templates")
                own_disk = os.dup(disk)
            except (OSError, RuntimeError) as exc:
                return Cold(WarmStart.NO_TEMPLATE, f"there is no template of it, and none can be made now: {exc}")
            self._wanted.put(_Wanted(key, definition, own_disk, container.id, image_of(container)))
            self._under_way.add(key)
        return Cold(WarmStart.NO_TEMPLATE, "there is no template of it yet; one is being made")

    def note_unfit(self, key: str, image: str, why: str, seconds: float | None = None) -> None:
        """Drops the template. For `seconds`, no template of this machine is made; None means while this process lives."""
        log.warning("template.unfit", template=key[:12], image=image, error=why)
        until = None if seconds is None else self.clock.monotonic() + seconds
        with self._lock:
            self._unfit.pop(key, None)  # the newest are last
            self._unfit[key] = _Unfit(image, why, until)
            while len(self._unfit) > _MOST_UNFIT:
                del self._unfit[next(iter(self._unfit))]
            self._drop(key)

    def kept(self) -> Sequence[Kept]:
        with self._lock:
            return [Kept(key, one.template.bytes, one.used_at, one.image) for key, one in self._kept.items()]

    def facts(self) -> Mapping[str, object]:
        """For people: what can start from a template, and what cannot, and why."""
        kept, now = self.kept(), self.clock.monotonic()
        with self._lock:
            unfit = [one for one in self._unfit.values() if one.holds_at(now)]
            making = len(self._under_way)
        return {
            "limitBytes": self.most.now,
            "kept": [{"image": one.image, "bytes": one.bytes} for one in kept],
            "making": making,
            "unfit": [{"image": one.image, "why": one.why} for one in unfit],
        }

    def remove_leftovers(self) -> None:
        """Removes the files of a template that a killed virtshim was making. Its VM is gone."""
        try:
            self.files.remove_leftovers()
        except ShimError as exc:
            log.warning("template.not_removed", error=str(exc))

    def close(self) -> None:
        self._closing.set()
        if (booting := self._booting) is not None:
            with contextlib.suppress(ShimError):
                self.hypervisor.destroy(*booting)
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSED)
        with self._lock:
            for key in list(self._kept):
                self._drop(key)

    # --- below: the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            self._drop_unused()
            try:
                self._end_vms()
            except ShimError as exc:
                log.warning("template.not_ended", error=str(exc))
            try:
                wanted = self._wanted.get(timeout=_SOON if self._to_end else _REST)
            except queue.Empty:
                continue
            if wanted is None:
                return
            try:
                self._make(wanted)
            except ShimError as exc:
                self.note_unfit(wanted.key, wanted.image, f"its template could not be made: {exc}", _AGAIN)
            except Exception as exc:  # the edge of the thread: the next one must be made
                log.exception("template.crashed", template=wanted.key[:12])
                why = f"its template could not be made: {type(exc).__name__}"
                self.note_unfit(wanted.key, wanted.image, why, _AGAIN)
            finally:
                os.close(wanted.disk)
                with self._lock:
                    self._under_way.discard(wanted.key)

    def _drop_unused(self) -> None:
        with self._lock:
            for key, entry in list(self._kept.items()):
                if self.clock.monotonic() - entry.used_at > _UNUSED or not self.most.now:
                    self._drop(key)

    def _make(self, wanted: _Wanted) -> None:
        if not self._makes_room(memory_bytes_in(wanted.definition)):
            self.note_unfit(wanted.key, wanted.image, "its memory is larger than templates.max_bytes", _AGAIN)
            return
        began = self.clock.monotonic()
        made = self._made(wanted)
        if made is None:
            return
        with self._lock:
            self._kept[wanted.key] = _Entry(made, self.clock.monotonic(), wanted.image)
        seconds = round(self.clock.monotonic() - began, 1)
        log.info("template.made", template=wanted.key[:12], bytes=made.bytes, seconds=seconds)

    def _made(self, wanted: _Wanted) -> Template | None:
        """None if its guest cannot be copied."""
        template, sandbox = ContainerId(secrets.token_hex(32)), SandboxId(secrets.token_hex(32))
        with contextlib.ExitStack() as closing:
            closing.enter_context(self.locks.held(sandbox))  # so that its VM is not taken for a leftover
            closing.callback(self.files.remove, template)
            opened = closing.enter_context(contextlib.ExitStack())
            opened.callback(os.close, memory := self.files.memory(memory_bytes_in(wanted.definition)))
            opened.callback(os.close, devices := self.files.devices())
            began = self.clock.monotonic()
            with self._booted(wanted, template, sandbox, memory) as domain:
                if why := self._refusal(template):
                    self.note_unfit(wanted.key, wanted.image, f"its guest cannot be copied: {why}")
                    return None
                booted_in = self.clock.monotonic() - began
                self.clock.wait(self._closing, _QUIET)
                self._write_devices(domain, template, devices)
            made = self._sealed(template, memory, devices)
            opened.pop_all()  # they are the template's
            return dataclasses.replace(made, booted_in=booted_in)

    def _sealed(self, template: ContainerId, memory: int, devices: int) -> Template:
        until = self.clock.monotonic() + _UNMAPPED
        while True:
            try:
                return self.files.seal(template, memory, devices)
            except Unavailable:
                if self.clock.monotonic() > until:
                    raise
                self.clock.wait(self._closing, _LOOK)

    def _makes_room(self, wanted: int) -> bool:
        gone = to_drop(self.kept(), wanted, self.most.now)
        with self._lock:
            for key in gone or ():
                self._drop(key)
        return gone is not None

    @contextlib.contextmanager
    def _booted(self, wanted: _Wanted, template: ContainerId, sandbox: SandboxId, memory: int) -> Iterator[uuid.UUID]:
        """The VM of a template that boots. It is gone afterwards."""
        domain = template.domain_uuid()
        try:
            with self.uid() as uid:
                disk = self.files.begin(template, wanted.disk)
                names = self._names(wanted.container, template, sandbox, uid)
                self.vms.define(template_xml(wanted.definition, names), disk)
            self._booting = (domain, template)
            if self._closing.is_set():
                raise Unavailable("virtshim is stopping")
            self.vms.boot(domain, template, memory)
            yield domain
        finally:
            self._booting = None
            self.agents.forget(template)
            self._to_end.append((domain, template))
            self._end_vms()

    def _end_vms(self) -> None:
        """libvirt may not answer just now. Raises ShimError; the thread tries again."""
        while self._to_end:
            domain, template = self._to_end[0]
            self.hypervisor.destroy(domain, template)
            self.hypervisor.undefine(domain, template)
            del self._to_end[0]

    def _refusal(self, template: ContainerId) -> str:
        """Why copies of a template's guest could not become guests of their own; "" if they can."""
        fresh = new_time_and_seed(self.clock.now_ns())
        try:
            code, said = self.guests.run_script(
                template, PROBE, (RESEED,), fresh, self.agent_timeout.now, self._closing
            )
        except WrongState as exc:
            return str(exc)
        except DeadlineExceeded:
            return f"no guest agent has answered within {self.agent_timeout.now:g} s (vm.agent_timeout)"
        return "" if not code else said or f"a script ended with {code}"

    def _write_devices(self, domain: uuid.UUID, template: ContainerId, devices: int) -> None:
        # Its agent stays connected: an agent without a connection sleeps, and its copies would sleep on.
        self.pausing.pause(domain, template)
        self.streams.leave_memory_out(domain, template, left_out=True)
        self.streams.send(domain, template, devices)
        self._until_written(domain, template, stopped=True)
        self.streams.go_on(domain, template)
        self._until_written(domain, template)

    def _until_written(self, domain: uuid.UUID, template: ContainerId, *, stopped: bool = False) -> None:
        wait_for_stream(
            lambda: self.streams.state(domain, template),
            self.clock,
            _WRITTEN,
            "QEMU did not write its devices",
            stopped=stopped,
            check=self._refuse_if_closing,
        )

    def _refuse_if_closing(self) -> None:
        if self._closing.is_set():
            raise Unavailable("virtshim is stopping")

    def _names(self, container: ContainerId, template: ContainerId, sandbox: SandboxId, uid: int) -> TemplateNames:
        before, now = directories_of(self.layout, container, ""), directories_of(self.layout, template, "")
        return TemplateNames(
            name=f"virtshim-template-{template.value[:12]}",
            uuid=str(template.domain_uuid()),
            container=template,
            sandbox=sandbox,
            uid=uid,
            moved=dict(zip(before, (self.layout.template_dir(template), *now[1:]), strict=True)),
        )

    def _drop(self, key: str) -> None:
        """The caller holds the lock."""
        if (entry := self._kept.pop(key, None)) is not None:
            for one in (entry.template.memory, entry.template.devices, entry.template.disk):
                os.close(one)


def _duplicate(template: Template, closing: contextlib.ExitStack) -> Template:
    """With descriptors of its own, which `closing` closes."""

    def again(descriptor: int) -> int:
        new = os.dup(descriptor)
        closing.callback(os.close, new)
        return new

    return dataclasses.replace(
        template, memory=again(template.memory), devices=again(template.devices), disk=again(template.disk)
    )


def image_of(container: Container) -> str:
    """The image's name as the pod's author wrote it."""
    return container.config.user_image or container.config.image
