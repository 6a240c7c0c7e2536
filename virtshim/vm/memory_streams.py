"""A guest's memory on its way from one QEMU to another: implements `virtshim.vm.ports.MemoryStreams`.

libvirt's own migration would need a libvirt daemon on each node that obeys the other one. So QEMU's monitor starts the migration,
and gets pipes as its ends. libvirt learns of it as of any pause.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Any, Final

import libvirt

from virtshim.model.errors import InternalError, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.text import escaped
from virtshim.system import process
from virtshim.vm.bounded import BoundedCalls
from virtshim.vm.connection import Connection
from virtshim.vm.control import without_secrets
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import DomainType
from virtshim.vm.errors import code_of, message_of
from virtshim.vm.guest_needs import (
    GuestNeeds,
    QemuHere,
    SavedMemory,
    begins_at,
    cpu_of,
    cpu_xml,
    machine_of,
    version_in,
)
from virtshim.vm.own_domains import OwnDomains
from virtshim.vm.restored_xml import memory_kib
from virtshim.vm.streams import StreamState
from virtshim.vm.xml_text import parsed

# Bytes per second. QEMU's default of 128 MiB/s is meant for links that others use, too.
_RATE: Final = 1 << 40
# Milliseconds for the rest of the memory: QEMU stops the guest as soon as it expects to need no more.
_STANDSTILL_MS: Final = 50
_PIPE: Final = "virtshim-memory"
_STOPPED: Final = "pre-switchover"
_FAILED: Final = frozenset({"failed", "cancelling", "cancelled"})
# Where QEMU has its devices, and what the names of vmwrapper's NICs begin with.
_DEVICES: Final = "/machine/peripheral"
_NIC: Final = "virtshimnic"
# Interrupts of a NIC beside those of its queues: of changes, and of the control queue.
_OTHER_VECTORS: Final = 2
# More than the header of a file that libvirt saved.
_HEAD_BYTES: Final = 4096
# QEMU before this version misses some of what an emulated CPU writes while the memory is copied ("system/physmem: Fix migration
# dirty bitmap coherency with TCG memory access"): the guest would continue with old pages, and crash. KVM finds all writes.
_EMULATED_WHILE_RUNNING: Final = (9, 0)
# Seconds for QEMU to answer its monitor.
_ANSWER: Final = 10.0
# libvirt cannot compare CPUs here.
_CANNOT_COMPARE: Final = frozenset({libvirt.VIR_ERR_NO_SUPPORT, libvirt.VIR_ERR_OPERATION_UNSUPPORTED})


class LibvirtMemoryStreams(OwnDomains):
    def __init__(self, connection: Connection, profile: NodeProfile) -> None:
        super().__init__(connection, profile)
        self._asking = BoundedCalls("ask the monitor of")

    def definition(self, domain: uuid.UUID, container: ContainerId) -> str:
        flags = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_MIGRATABLE
        with self._using(domain, "ask the monitor of", container) as found:
            return without_secrets(found.XMLDesc(flags))

    def blockers(self, domain: uuid.UUID, container: ContainerId) -> tuple[str, ...]:
        with _readable(domain):
            return tuple(map(str, self._ask(domain, container, "query-migrate").get("blocked-reasons", ())))

    def needs(self, domain: uuid.UUID, container: ContainerId) -> GuestNeeds:
        version = self._qemu(domain, container)
        with _readable(domain):
            queues = self._queues(domain, container)
        with self._using(domain, "ask the monitor of", container) as found:
            definition = found.XMLDesc(0)
        machine = machine_of(definition)
        with self._connection.using("read what this node's QEMU has") as conn:
            cpu = cpu_of(definition, self._capabilities(conn, machine))
        return GuestNeeds(machine, version, cpu, queues)

    def _qemu(self, domain: uuid.UUID, container: ContainerId) -> tuple[int, int]:
        """The version of the QEMU that runs."""
        with _readable(domain):
            version = self._ask(domain, container, "query-version").get("qemu") or {}
            return int(version.get("major", 0)), int(version.get("minor", 0))

    def _queues(self, domain: uuid.UUID, container: ContainerId) -> tuple[int, ...]:
        """QEMU shows how many interrupts a virtio NIC has: two for each queue, and some others. Other NICs have one queue."""
        devices = self._answer(domain, container, "qom-list", {"path": _DEVICES})
        kinds = {str(one.get("name")): str(one.get("type")) for one in devices or ()}
        found: list[int] = []
        while (name := f"{_NIC}{len(found)}") in kinds:
            vectors = 0
            if "virtio" in kinds[name]:
                asked: dict[str, object] = {"path": f"{_DEVICES}/{name}", "property": "vectors"}
                vectors = int(self._answer(domain, container, "qom-get", asked))
            found.append(max(1, (vectors - _OTHER_VECTORS) // 2))
        return tuple(found)

    def saved(self, memory: str) -> SavedMemory:
        try:
            with open(memory, "rb") as file:
                at = begins_at(file.read(_HEAD_BYTES))
        except OSError as exc:
            raise InternalError(f"the saved memory {memory} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise WrongState(f"the saved memory {memory} cannot be sent: {exc}") from exc
        with self._connection.using(f"read the definition in {memory}") as conn:
            definition = without_secrets(conn.saveImageGetXMLDesc(memory, libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE))
            machine = machine_of(definition)
            needs = GuestNeeds(machine, (0, 0), cpu_of(definition, self._capabilities(conn, machine)))
        return SavedMemory(definition, needs, memory_kib(parsed(definition)) << 10, at)

    def here(self, needs: GuestNeeds) -> QemuHere:
        said = process.run([self._profile.qemu, "--version"], timeout=_ANSWER)
        try:
            version = version_in(said.stdout.decode(errors="replace"))
        except ValueError as exc:
            raise InternalError(f"{self._profile.qemu} does not say its version: {said.summary()}") from exc
        with self._connection.using("compare a guest with this node's QEMU") as conn:
            try:
                self._capabilities(conn, needs.machine)
            except libvirt.libvirtError as exc:
                if code_of(exc) != libvirt.VIR_ERR_INVALID_ARG:
                    raise
                return QemuHere(version, has_machine=False)
            return QemuHere(version, lacks_cpu=self._lacks_cpu(conn, needs))

    def _lacks_cpu(self, conn: libvirt.virConnect, needs: GuestNeeds) -> str:
        if needs.cpu is None:
            return ""
        kind, strict = self._profile.domain_type.value, libvirt.VIR_CONNECT_COMPARE_CPU_FAIL_INCOMPATIBLE
        try:
            conn.compareHypervisorCPU(
                self._profile.vmwrapper, "x86_64", needs.machine, kind, cpu_xml(needs.cpu), strict
            )
        except libvirt.libvirtError as exc:
            if not conn.isAlive():
                raise
            return "" if code_of(exc) in _CANNOT_COMPARE else message_of(exc)
        return ""

    def _capabilities(self, conn: libvirt.virConnect, machine: str) -> str:
        kind = self._profile.domain_type.value
        return str(conn.getDomainCapabilities(self._profile.vmwrapper, "x86_64", machine, kind))

    def send(self, domain: uuid.UUID, container: ContainerId, pipe: int) -> None:
        wait = {"capability": "pause-before-switchover", "state": True}
        self._ask(domain, container, "migrate-set-capabilities", {"capabilities": [wait]})
        limits: dict[str, object] = {"max-bandwidth": _RATE, "downtime-limit": _STANDSTILL_MS}
        self._ask(domain, container, "migrate-set-parameters", limits)
        self._with_pipe(domain, container, pipe, "migrate")

    def can_copy_while_running(self, domain: uuid.UUID, container: ContainerId) -> bool:
        return (
            self._profile.domain_type is not DomainType.QEMU or self._qemu(domain, container) >= _EMULATED_WHILE_RUNNING
        )

    def leave_memory_out(self, domain: uuid.UUID, container: ContainerId, *, left_out: bool) -> None:
        shared = {"capability": "x-ignore-shared", "state": left_out}
        self._ask(domain, container, "migrate-set-capabilities", {"capabilities": [shared]})

    def go_on(self, domain: uuid.UUID, container: ContainerId) -> None:
        self._ask(domain, container, "migrate-continue", {"state": _STOPPED})

    def receive(self, domain: uuid.UUID, container: ContainerId, pipe: int) -> None:
        # The last part of a disk may come after the memory. QEMU must not have read the disk by then, nor a header that nobody
        # has checked.
        late = {"capability": "late-block-activate", "state": True}
        self._ask(domain, container, "migrate-set-capabilities", {"capabilities": [late]})
        self._with_pipe(domain, container, pipe, "migrate-incoming")

    def state(self, domain: uuid.UUID, container: ContainerId) -> StreamState:
        found = self._ask(domain, container, "query-migrate")
        with _readable(domain):
            status, left = str(found.get("status", "")), int((found.get("ram") or {}).get("remaining", 0))
        if status in _FAILED:
            why = escaped(str(found.get("error-desc", status)), 300)
            return StreamState(failed=f"QEMU could not move the guest's memory: {why}")
        return StreamState(stopped=status == _STOPPED, done=status == "completed", left=left)

    def cancel(self, domain: uuid.UUID, container: ContainerId) -> None:
        self._ask(domain, container, "migrate_cancel")

    def _with_pipe(self, domain: uuid.UUID, container: ContainerId, pipe: int, command: str) -> None:
        self._ask(domain, container, "getfd", {"fdname": _PIPE}, [pipe])
        self._ask(domain, container, command, {"uri": f"fd:{_PIPE}"})

    def _ask(
        self,
        domain: uuid.UUID,
        container: ContainerId,
        command: str,
        arguments: dict[str, object] | None = None,
        files: list[int] | None = None,
    ) -> dict[str, Any]:
        result = self._answer(domain, container, command, arguments, files)
        return result if isinstance(result, dict) else {}

    def _answer(
        self,
        domain: uuid.UUID,
        container: ContainerId,
        command: str,
        arguments: dict[str, object] | None = None,
        files: list[int] | None = None,
    ) -> Any:
        import libvirt_qemu

        text = json.dumps({"execute": command, "arguments": arguments or {}})

        def ask() -> str:
            with self._using(domain, "ask the monitor of", container) as found:
                if not found.isActive():
                    raise WrongState(f"VM {domain} is off")
                if files is None:
                    return str(libvirt_qemu.qemuMonitorCommand(found, text, 0))
                return str(libvirt_qemu.qemuMonitorCommandWithFiles(found, text, files, 0)[0])

        answer = json.loads(self._asking.call(domain, ask, _ANSWER))
        if "error" in answer:
            with _readable(domain):
                why = str(answer["error"]["desc"])
            raise InternalError(f"QEMU of VM {domain} refuses {command}: {escaped(why, 300)}")
        return answer.get("return")


@contextlib.contextmanager
def _readable(domain: uuid.UUID) -> Iterator[None]:
    """Within the block, an answer of QEMU is read. A QEMU that its guest has taken over may answer anything."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
        raise InternalError(f"QEMU of VM {domain} gave an answer that cannot be read: {exc!r}") from exc
