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
from virtshim.vm import ownership
from virtshim.vm.bounded import BoundedCalls
from virtshim.vm.connection import Connection
from virtshim.vm.control import without_secrets
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.streams import StreamState

# Bytes per second. QEMU's default of 128 MiB/s is meant for links that others use, too.
_RATE: Final = 1 << 40
# Milliseconds for the rest of the memory: QEMU stops the guest as soon as it expects to need no more.
_STANDSTILL_MS: Final = 50
_PIPE: Final = "virtshim-memory"
_STOPPED: Final = "pre-switchover"
_FAILED: Final = frozenset({"failed", "cancelling", "cancelled"})


class LibvirtMemoryStreams:
    def __init__(self, connection: Connection, profile: NodeProfile, limit: float = 10.0) -> None:
        """`limit`: seconds for QEMU to answer its monitor."""
        self._connection = connection
        self._profile = profile
        self._limit = limit
        self._asking = BoundedCalls("ask the monitor of")

    def definition(self, domain: uuid.UUID, container: ContainerId) -> str:
        flags = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_MIGRATABLE
        with self._using(domain, container) as found:
            return without_secrets(found.XMLDesc(flags))

    def blockers(self, domain: uuid.UUID, container: ContainerId) -> tuple[str, ...]:
        return tuple(map(str, self._ask(domain, container, "query-migrate").get("blocked-reasons", ())))

    def send(self, domain: uuid.UUID, container: ContainerId, pipe: int) -> None:
        wait = {"capability": "pause-before-switchover", "state": True}
        self._ask(domain, container, "migrate-set-capabilities", {"capabilities": [wait]})
        limits: dict[str, object] = {"max-bandwidth": _RATE, "downtime-limit": _STANDSTILL_MS}
        self._ask(domain, container, "migrate-set-parameters", limits)
        self._with_pipe(domain, container, pipe, "migrate")

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
        status, memory = found.get("status", ""), found.get("ram") or {}
        if status in _FAILED:
            why = escaped(str(found.get("error-desc", status)), 300)
            return StreamState(failed=f"QEMU could not move the guest's memory: {why}")
        stopped, done = status == _STOPPED, status == "completed"
        left = memory.get("remaining", 0)
        return StreamState(stopped=stopped, done=done, left=left if isinstance(left, int) else 0)

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
        import libvirt_qemu

        text = json.dumps({"execute": command, "arguments": arguments or {}})

        def ask() -> str:
            with self._using(domain, container) as found:
                if not found.isActive():
                    raise WrongState(f"VM {domain} is off")
                if files is None:
                    return str(libvirt_qemu.qemuMonitorCommand(found, text, 0))
                return str(libvirt_qemu.qemuMonitorCommandWithFiles(found, text, files, 0)[0])

        answer = json.loads(self._asking.call(domain, ask, self._limit))
        if "error" in answer:
            raise InternalError(
                f"QEMU of VM {domain} refuses {command}: {escaped(str(answer['error'].get('desc')), 300)}"
            )
        result = answer.get("return")
        return result if isinstance(result, dict) else {}

    @contextlib.contextmanager
    def _using(self, domain: uuid.UUID, container: ContainerId) -> Iterator[libvirt.virDomain]:
        with self._connection.using(f"ask the monitor of VM {domain}") as conn:
            yield ownership.find(conn, domain, self._profile.node, container)
