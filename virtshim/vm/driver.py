"""Virtual machines by libvirt. Implements `virtshim.vm.ports.Hypervisor`.

Every look-up checks the owner mark. A domain without it, or with another node's id, does not exist here, whatever its
UUID (a pod may choose one). Nothing here can therefore end, change or remove a foreign VM.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import libvirt
import structlog

from virtshim.model.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    ShimError,
    WrongState,
)
from virtshim.model.ids import ContainerId
from virtshim.model.vm import Disk, OwnedDomain, PowerState, VmSpec
from virtshim.vm import cpu_query, domain_xml, ownership
from virtshim.vm.bounded import BoundedCalls, EarlyCalls
from virtshim.vm.connection import Connection
from virtshim.vm.disk_chains import hand_over_images, move_images, refuse_changed, volumes_handed_over
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements import disk, hostdev
from virtshim.vm.elements.processors import DomainType
from virtshim.vm.elements.small_devices import vnc_socket_in
from virtshim.vm.elements.text import vm_uid_in
from virtshim.vm.ends import QemuExitWatcher, has_reusable_parts, start_failed
from virtshim.vm.errors import code_of, message_of
from virtshim.vm.events import Lifecycle
from virtshim.vm.file_owner import give_to_qemu, take_back_libvirts, take_back_vms, vnc_directory_writable
from virtshim.vm.firmware import (
    let_qemu_reach_tpm_sockets,
    refuse_foreign_tpm_state,
    refuse_missing_programs,
    refuse_without_direct_io,
    remove_tpm_log,
    remove_tpm_state,
    tpm_log_directory,
    tpm_socket_directory,
    tpm_state_directory,
)
from virtshim.vm.memory_offer import memory_offered
from virtshim.vm.power import ABSENT, power_of
from virtshim.vm.qemu_output import QemuOutput
from virtshim.vm.qemu_process import log_directory, pid_directory, remove_logs, state_directory
from virtshim.vm.restored_xml import arriving_xml, restored_xml
from virtshim.vm.statistics import AgentArrivals, BusyVms
from virtshim.vm.warm_xml import on_memory_xml
from virtshim.vm.xml_text import parsed

log = structlog.get_logger(__name__)

_Key = TypeVar("_Key", str, bytes)

_OWN_DEFINITION = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE
# Seconds for QEMU to accept a press of the power button, which takes a working one milliseconds.
_PRESS_LIMIT = 2.0
# Seconds for libvirt to clean up a VM whose QEMU is gone: 0.2 s, and what the clean-up takes.
_CLEANED_UP = 2.0
# Seconds for libvirt to notice that QEMU is gone, when this process ends.
_LAST_LOOK = 1.0


@dataclass(frozen=True, slots=True)
class _Flags:
    """Flags of QEMU's driver; the test driver knows none of them."""

    shut_down: int
    undefine: int


# Flag 0 is wrong for the shutdown: libvirt would first ask the guest agent, which belongs to virtshim.
_QEMU_FLAGS = _Flags(
    shut_down=libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN,
    undefine=libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_KEEP_NVRAM,  # the file is beside the root disk, and removed with it
)
_TEST_FLAGS = _Flags(shut_down=0, undefine=0)


class LibvirtHypervisor:
    """Must be made before `connection.start()`, because it needs to hear of each new connection. `close` ends its own
    threads; whoever made the connection closes it."""

    def __init__(self, connection: Connection, profile: NodeProfile, uri: str = "") -> None:
        """`uri`: the connection's, if QEMU's processes may be watched; otherwise only libvirt reports their ends."""
        self._connection = connection
        self._profile = profile
        self._flags = _TEST_FLAGS if profile.domain_type is DomainType.TEST else _QEMU_FLAGS
        self._events = Lifecycle(lambda: [domain.uuid for domain in self.owned()])
        self._state_directory = state_directory(uri)
        self._log_directory = log_directory(uri)
        self._tpm_states = tpm_state_directory(pid_directory(uri))
        self._tpm_logs = tpm_log_directory(pid_directory(uri))
        self._tpm_sockets = tpm_socket_directory(pid_directory(uri))
        self._embedded_running = pid_directory(uri) if "/embed" in uri else ""
        self._exits = QemuExitWatcher(pid_directory(uri), self._events.happened, is_embedded="/embed" in uri)
        self._output = QemuOutput(profile.output_pipes)
        self._pressing = BoundedCalls("shut down")
        self._destroying = EarlyCalls()
        # Destroyed VMs of which no other VM gets anything, so nobody has to wait until libvirt has cleaned up.
        self._let_go: set[uuid.UUID] = set()
        # VMs that are starting or ending now. Statistics leave them out.
        self.busy = BusyVms()
        # libvirt accepts one callback for this event, so its receiver passes it on.
        self.agents = AgentArrivals()
        self._short_cpu_query = False
        # The versioned machine type of a new VM, which changes when QEMU is upgraded; "" while unknown.
        self.machine_type = ""
        self.close = self._end_threads
        connection.on_open(self._subscribe, self._notify_after_reconnect)

    def define(self, spec: VmSpec) -> None:
        if self._profile.domain_type is not DomainType.TEST:
            refuse_missing_programs(spec.hardware, spec.firmware_files, spec.nvram)
            refuse_without_direct_io(spec.hardware.cache, spec.disks)
        with self._connection.using(f"define VM {spec.name}") as conn:
            qemu = self._connection.qemu_ids()
            runs_as = qemu and qemu.for_vm(spec.uid)
            xml = domain_xml.build(spec, self._profile, runs_as, short_cpu_query=self._short_cpu_query)
            self._remove_earlier(conn, spec)
            if spec.hardware.tpm and not spec.owns_tpm and _lookup(conn.lookupByUUID, spec.uuid.bytes) is None:
                refuse_foreign_tpm_state(self._tpm_states, spec.uuid)
            if runs_as is not None:
                give_to_qemu((*spec.disks, *domain_xml.files_beside_disks(spec)), runs_as)
            began = time.monotonic()
            conn.defineXML(xml)
        log.info("libvirt.domain.defined", name=spec.name, ms=_ms_since(began))

    def start(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        self._run(domain, container, lambda _conn, found: found.create())

    def restore(self, domain: uuid.UUID, container: ContainerId, memory: str, moved: Mapping[str, str]) -> None:
        """Implements `Hypervisor.restore`. Leaves the guest paused, so that the caller can first record that the state
        is used up."""

        def load(conn: libvirt.virConnect, found: libvirt.virDomain) -> None:
            saved = conn.saveImageGetXMLDesc(memory, libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE)
            own = found.XMLDesc(_OWN_DEFINITION)
            conn.restoreFlags(memory, restored_xml(saved, own, moved), libvirt.VIR_DOMAIN_SAVE_PAUSED)

        self._run(domain, container, load)

    def await_memory(self, domain: uuid.UUID, container: ContainerId, theirs: str, moved: Mapping[str, str]) -> None:
        def launch(conn: libvirt.virConnect, found: libvirt.virDomain) -> None:
            own = found.XMLDesc(_OWN_DEFINITION)
            conn.createXML(arriving_xml(theirs, own, moved), libvirt.VIR_DOMAIN_START_PAUSED)

        self._run(domain, container, launch)

    def own_definition(self, domain: uuid.UUID, container: ContainerId) -> str:
        """The definition that the VM starts with, including all secrets. Errors as of `Hypervisor`."""
        with self._connection.using(f"read the definition of VM {domain}") as conn:
            found = self._find(conn, domain, container)
            return str(found.XMLDesc(_OWN_DEFINITION))

    def define_template(self, definition: str, disk_file: Disk) -> None:
        """Defines a template's VM and gives QEMU its disk, the template's only file. Errors as of `Hypervisor`."""
        with self._connection.using("define a template") as conn:
            qemu = self._connection.qemu_ids()
            if qemu is not None:
                give_to_qemu((disk_file,), qemu.for_vm(vm_uid_in(definition)))
            conn.defineXML(definition)

    def start_on_memory(
        self, domain: uuid.UUID, container: ContainerId, memory: int, socket: str, *, shared: bool
    ) -> None:
        """Starts a VM whose memory is the file behind the descriptor `memory`. With `shared` the guest boots and writes
        to the file. Without `shared` the guest's writes stay private, and the VM waits for the state of its devices
        (`MemoryStreams.receive`). `socket`: the path of a socket that exists during the call. Errors as of
        `Hypervisor`."""

        def launch(conn: libvirt.virConnect, found: libvirt.virDomain) -> None:
            own = found.XMLDesc(_OWN_DEFINITION)
            qemu = self._connection.qemu_ids()
            with memory_offered(socket, memory, qemu and qemu.for_vm(vm_uid_in(own)), shared=shared):
                definition = on_memory_xml(own, socket, waits=not shared)
                conn.createXML(definition, 0 if shared else libvirt.VIR_DOMAIN_START_PAUSED)

        self._run(domain, container, launch)

    def accept_disks(self, domain: uuid.UUID, container: ContainerId, their_images: str, images: str) -> None:
        with self._connection.using(f"check the disks of VM {domain}") as conn:
            for file in disk.qcow2_files_in(self._find(conn, domain, container).XMLDesc()):
                try:
                    move_images(file.path, their_images, images)
                except OSError as exc:
                    raise InternalError(f"the header of {file.path} cannot be written: {exc.strerror}") from exc
                refuse_changed(file)

    def _run(
        self,
        domain: uuid.UUID,
        container: ContainerId | None,
        create: Callable[[libvirt.virConnect, libvirt.virDomain], object],
    ) -> None:
        with self._connection.using(f"start VM {domain}") as conn:
            found = self._find(conn, domain, container)
            if self._is_on(found):
                raise WrongState(f"VM {domain} is running already")
            self._exits.forget(domain)
            self._let_go.discard(domain)
            definition = found.XMLDesc()
            qemu = self._connection.qemu_ids()
            runs_as = qemu and qemu.for_vm(vm_uid_in(definition))
            if "<tpm" in definition:
                let_qemu_reach_tpm_sockets(self._tpm_sockets, runs_as)
            for file in disk.qcow2_files_in(definition):
                refuse_changed(file)
            hand_over_images(found, disk.images_in(definition))
            with (
                vnc_directory_writable(vnc_socket_in(definition), runs_as),
                volumes_handed_over(found, hostdev.files_in(definition)),
                self._output.of_start(found.name(), runs_as) as said,
            ):
                began = time.monotonic()
                self._create(domain, conn, found, create, said)
                self.agents.begin(domain)
            if self._state_directory:
                take_back_vms(self._state_directory, found.ID(), found.name())
            log.info("libvirt.domain.started", name=found.name(), ms=_ms_since(began))
            self._follow_exit(domain, found.name())

    def _follow_exit(self, domain: uuid.UUID, name: str) -> None:
        """Watches QEMU. A started VM must not fail because a thread or descriptor is missing: libvirt reports its end a
        little later."""
        try:
            self._exits.follow(domain, name)
        except Exception as exc:  # noqa: BLE001  any error: the VM is on
            log.warning("libvirt.domain.not_followed", name=name, error=str(exc))

    def _create(
        self,
        domain: uuid.UUID,
        conn: libvirt.virConnect,
        found: libvirt.virDomain,
        create: Callable[[libvirt.virConnect, libvirt.virDomain], object],
        said: Callable[[], str],
    ) -> None:
        try:
            self._exits.expect_event(domain)
            with self.busy.held(domain):
                create(conn, found)
        except libvirt.libvirtError as exc:
            self._exits.forget(domain)
            raise start_failed(found.name(), exc, said()) from exc

    def ask_to_shut_down(self, domain: uuid.UUID) -> None:
        def press() -> None:
            self._end(domain, "shut down", lambda found: found.shutdownFlags(self._flags.shut_down))

        with contextlib.suppress(DeadlineExceeded):  # QEMU hangs; the grace period ends it
            self._pressing.call(domain, press, _PRESS_LIMIT)

    def destroy(self, domain: uuid.UUID, container: ContainerId) -> None:
        if domain in self._let_go and self._exits.over(domain) is not None:
            return  # an earlier call ended it, and libvirt would answer only when it has cleaned up

        # libvirt limits this itself: SIGTERM, SIGKILL after 10 s, and an error after another 5 s. It checks every 200
        # ms whether QEMU is gone, which the kernel reports at once.
        def act(found: libvirt.virDomain) -> None:
            definition = found.XMLDesc()
            # libvirt keeps the devices from the next VM until it has cleaned up.
            has_devices = "<hostdev" in definition or bool(hostdev.files_in(definition))
            patience = _CLEANED_UP if has_reusable_parts(definition, container) else 0.0
            if not has_devices and not patience:
                self._let_go.add(domain)
            self._exits.will_destroy(domain)
            with self._events.watching(domain) as news:
                self._destroying.call(
                    domain,
                    lambda: self._destroy_now(domain, found),
                    lambda: not has_devices and self._exits.over(domain) is not None,
                    news,
                    patience,
                )

        self._end(domain, "destroy", act, container)

    def _destroy_now(self, domain: uuid.UUID, found: libvirt.virDomain) -> None:
        with self.busy.held(domain):
            found.destroyFlags(libvirt.VIR_DOMAIN_DESTROY_DEFAULT)

    def undefine(self, domain: uuid.UUID, container: ContainerId) -> None:
        with contextlib.suppress(NotFound), self._connection.using(f"undefine VM {domain}") as conn:
            self._remove(self._find(conn, domain, container))
            self._exits.forget(domain)
            self._let_go.discard(domain)

    def power(self, domain: uuid.UUID) -> PowerState:
        if (over := self._exits.over(domain)) is not None:
            return over
        try:
            with self._connection.using(f"read the state of VM {domain}") as conn:
                found = power_of(self._find(conn, domain))
        except NotFound:
            return ABSENT
        return self._exits.corrected(domain, found)

    def owned(self) -> Sequence[OwnedDomain]:
        with self._connection.using("list VMs") as conn:
            rows = conn.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_STATE, 0)
            found = [self._owned(domain, stats) for domain, stats in rows]
        return [domain for domain in found if domain is not None]

    def watching(self, domain: uuid.UUID) -> AbstractContextManager[threading.Event]:
        return self._events.watching(domain)

    def on_power_event(self, callback: Callable[[uuid.UUID], None]) -> None:
        self._events.add_callback(callback)

    def trouble(self) -> str:
        return self._connection.trouble()

    def _warm_up(self, conn: libvirt.virConnect) -> None:
        """libvirt runs an unknown emulator a few times to learn its features, which takes seconds. This does it before
        the first pod's CreateContainer. A failure is only logged, because `define` reports it again."""
        if self._profile.domain_type is DomainType.TEST:
            return
        try:
            capabilities = conn.getDomainCapabilities(
                self._profile.vmwrapper, "x86_64", "q35", self._profile.domain_type.value
            )
        except libvirt.libvirtError as exc:
            log.warning("libvirt.capabilities.failed", emulator=self._profile.vmwrapper, error=message_of(exc))
            return
        self.machine_type = parsed(capabilities).findtext("machine", "")
        why_not = cpu_query.refusal(conn, self._profile.vmwrapper, self._profile.domain_type.value)
        if why_not:
            log.warning("libvirt.cpu_query.long", error=why_not)  # each start takes some 0.4 s longer
        self._short_cpu_query = not why_not

    def _end_threads(self) -> None:
        self._destroying.close(_LAST_LOOK)
        self._exits.close()
        self._output.close()
        self._events.close()

    def _subscribe(self, conn: libvirt.virConnect) -> None:
        if self._embedded_running:
            take_back_libvirts(self._state_directory, self._embedded_running)
        self._warm_up(conn)
        conn.domainEventRegisterAny(None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._on_lifecycle, None)
        conn.domainEventRegisterAny(None, libvirt.VIR_DOMAIN_EVENT_ID_REBOOT, self._on_reboot, None)
        for event in (
            libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED,
            libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVAL_FAILED,
        ):
            conn.domainEventRegisterAny(None, event, self._on_device, None)

    def _notify_after_reconnect(self) -> None:
        """After a restart, libvirt's threads look for each VM's QEMU. Until then a VM counts as running, and if QEMU is
        gone, it is turned off without an event. Balloon numbers need QEMU's monitor, so asking for them waits for those
        threads."""
        wanted = libvirt.VIR_DOMAIN_STATS_STATE | libvirt.VIR_DOMAIN_STATS_BALLOON
        with contextlib.suppress(ShimError), self._connection.using("wait for VMs to be found again") as conn:
            conn.getAllDomainStats(wanted, libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_ACTIVE)
        self._exits.forget_exits()
        with contextlib.suppress(ShimError):
            there = self.owned()
            self._exits.keep([domain.uuid for domain in there])
            for domain in there:
                if domain.state.is_on:
                    self._exits.expect_event(domain.uuid)
                    self._follow_exit(domain.uuid, domain.name)
                    self._take_back(domain)
                    self._output.follow(domain.name, domain.uuid)
        self._events.events_were_lost()

    def _take_back(self, domain: OwnedDomain) -> None:
        """Repeats this for VMs whose start a killed virtshim did not finish."""
        if not self._state_directory:
            return
        try:
            with self._connection.using(f"take back the directories of VM {domain.name}") as conn:
                number = conn.lookupByUUID(domain.uuid.bytes).ID()
            take_back_vms(self._state_directory, number, domain.name)
        except ShimError as exc:
            log.warning("security.not_taken_back", name=domain.name, error=str(exc))

    def _on_lifecycle(
        self, _conn: libvirt.virConnect, domain: libvirt.virDomain, event: int, detail: int, *_: object
    ) -> None:
        """Runs on libvirt's event thread, so it only hands over."""
        which = uuid.UUID(domain.UUIDString())
        if event == libvirt.VIR_DOMAIN_EVENT_SHUTDOWN:
            self._exits.shutting_down(which, by_host=detail == libvirt.VIR_DOMAIN_EVENT_SHUTDOWN_HOST)
        if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
            self._exits.stopped(which)
            self.agents.forget(which)
        self._events.happened(which)

    def _on_reboot(self, _conn: libvirt.virConnect, domain: libvirt.virDomain, *_: object) -> None:
        """Runs on libvirt's event thread, so it only hands over."""
        self._events.happened(uuid.UUID(domain.UUIDString()))

    def _on_device(self, _conn: libvirt.virConnect, domain: libvirt.virDomain, *_: object) -> None:
        """Runs on libvirt's event thread, so it only wakes the callers that wait for a guest to release a device."""
        self._events.wake(uuid.UUID(domain.UUIDString()))

    def _remove_earlier(self, conn: libvirt.virConnect, spec: VmSpec) -> None:
        """Removes an earlier definition of this node with the UUID. Raises AlreadyExists if UUID or name belong to
        another domain."""
        self._destroying.wait(
            spec.uuid
        )  # libvirt would take the disks from the new VM that it still takes from the last one
        if (existing := _lookup(conn.lookupByUUID, spec.uuid.bytes)) is not None:
            if not self._is_ours(existing):
                raise AlreadyExists(
                    f"VM {spec.name}: a libvirt domain with UUID {spec.uuid} exists ({existing.name()!r})"
                    " and is not this node's: choose another UUID for the pod, or remove that domain"
                )
            if existing.isActive() or existing.name() != spec.name:
                self._remove(existing)
            elif existing.hasManagedSaveImage():
                existing.managedSaveRemove()
        if (namesake := _lookup(conn.lookupByName, spec.name)) is not None and namesake.UUIDString() != str(spec.uuid):
            raise AlreadyExists(
                f"VM {spec.name}: a libvirt domain of that name exists with UUID {namesake.UUIDString()}:"
                " remove or rename it"
            )

    def _remove(self, domain: libvirt.virDomain) -> None:
        # Undefining a running domain would leave it running without a definition.
        if self._is_on(domain):
            raise WrongState(
                f"VM {domain.name()} is running: it must be off before its definition is removed or replaced"
            )
        if self._log_directory:
            try:
                remove_logs(self._log_directory, domain.name())
                remove_tpm_log(self._tpm_logs, domain.name())
            except OSError as exc:
                log.warning("libvirt.log.not_removed", name=domain.name(), error=str(exc))
        remove_tpm_state(self._tpm_states, uuid.UUID(domain.UUIDString()), domain.XMLDesc())
        domain.undefineFlags(self._flags.undefine)

    def _is_on(self, domain: libvirt.virDomain) -> bool:
        """Waits until libvirt has noticed QEMU's end, or has finished destroying the VM, because what follows may be
        another run."""
        self._destroying.wait(uuid.UUID(domain.UUIDString()))
        if self._exits.over(uuid.UUID(domain.UUIDString())) is not None:
            with contextlib.suppress(libvirt.libvirtError):  # "not running" once it has finished
                domain.destroyFlags(libvirt.VIR_DOMAIN_DESTROY_DEFAULT)
        return bool(domain.isActive())

    def _end(
        self,
        domain: uuid.UUID,
        what: str,
        act: Callable[[libvirt.virDomain], object],
        container: ContainerId | None = None,
    ) -> None:
        """Calls `act`, unless the VM is off or gone. An error of `act` only counts if the VM is still on afterwards."""
        with contextlib.suppress(NotFound), self._connection.using(f"{what} VM {domain}") as conn:
            found = self._find(conn, domain, container)
            if not found.isActive():
                return
            try:
                act(found)
            except libvirt.libvirtError:
                if found.isActive():
                    raise

    def _find(
        self, conn: libvirt.virConnect, domain: uuid.UUID, container: ContainerId | None = None
    ) -> libvirt.virDomain:
        return ownership.find(conn, domain, self._profile.node, container)

    def _is_ours(self, domain: libvirt.virDomain) -> bool:
        return ownership.is_ours(domain, self._profile.node)

    def _owned(self, domain: libvirt.virDomain, stats: Mapping[str, Any]) -> OwnedDomain | None:
        """None for a foreign domain, for one that has just gone, and for one with a damaged mark."""
        try:
            owner = ownership.owner_of(domain)
        except InvalidRequest as exc:
            log.warning("libvirt.domain.damaged_mark", name=domain.name(), error=str(exc))
            return None
        if owner is None or owner.node != self._profile.node:
            return None
        return ownership.owned(domain, owner, stats)


def _ms_since(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 1)


def _lookup(by: Callable[[_Key], libvirt.virDomain], key: _Key) -> libvirt.virDomain | None:
    try:
        return by(key)
    except libvirt.libvirtError as exc:
        if code_of(exc) == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise
