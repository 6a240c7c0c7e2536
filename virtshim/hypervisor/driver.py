"""Virtual machines by way of libvirt: implements `virtshim.ports.Hypervisor`.

Every look-up checks the owner mark: a domain without it, or with another node's id, does not exist for us, whatever its UUID
(a pod may choose one). So nothing here can end, change or remove a foreign VM.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import libvirt

from virtshim.domain.errors import AlreadyExists, InvalidRequest, NotFound, WrongState
from virtshim.domain.vm import OwnedDomain, PowerState, VmSpec
from virtshim.hypervisor import domain_xml, mark
from virtshim.hypervisor.connection import Connection
from virtshim.hypervisor.devices.cpu import DomainType
from virtshim.hypervisor.domain_xml import NodeProfile
from virtshim.hypervisor.errors import code_of
from virtshim.hypervisor.events import Lifecycle
from virtshim.hypervisor.power import ABSENT, to_power

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flags:
    """The test driver knows none of the flags that QEMU's needs."""

    shut_down: int
    undefine: int


# Not flag 0 for the shutdown: libvirt would ask the guest agent first, which is not its own to talk to.
_QEMU_FLAGS = _Flags(
    shut_down=libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN,
    undefine=libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM,
)
_TEST_FLAGS = _Flags(shut_down=0, undefine=0)

# It is off, or became so while we asked.
_NOT_RUNNING = frozenset({libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_DOMAIN})


class LibvirtHypervisor:
    """Make it before `connection.start()`: it has to hear of each new connection."""

    def __init__(self, connection: Connection, profile: NodeProfile) -> None:
        self._connection = connection
        self._profile = profile
        self._flags = _TEST_FLAGS if profile.domain_type is DomainType.TEST else _QEMU_FLAGS
        self._events = Lifecycle(lambda: [domain.uuid for domain in self.owned()])
        connection.on_open(self._subscribe)

    def close(self) -> None:
        """Ends the worker thread of `on_power_event`. The connection is closed by whoever made it."""
        self._events.close()

    def define(self, spec: VmSpec) -> None:
        xml = domain_xml.build(spec, self._profile)
        with self._connection.using(f"define VM {spec.name}") as conn:
            self._make_room(conn, spec)
            conn.defineXML(xml)

    def start(self, domain: uuid.UUID) -> None:
        with self._connection.using(f"start VM {domain}") as conn:
            self._find(conn, domain).create()

    def ask_to_shut_down(self, domain: uuid.UUID) -> None:
        with self._connection.using(f"shut down VM {domain}") as conn, _off_or_gone_is_fine():
            self._find(conn, domain).shutdownFlags(self._flags.shut_down)

    def destroy(self, domain: uuid.UUID) -> None:
        # libvirt bounds this itself: SIGTERM, SIGKILL after 10 s, an error after 15 s.
        with self._connection.using(f"destroy VM {domain}") as conn, _off_or_gone_is_fine():
            self._find(conn, domain).destroyFlags(libvirt.VIR_DOMAIN_DESTROY_DEFAULT)

    def undefine(self, domain: uuid.UUID) -> None:
        with self._connection.using(f"undefine VM {domain}") as conn, contextlib.suppress(NotFound):
            found = self._find(conn, domain)
            if found.isActive():
                raise WrongState(f"VM {domain} is running: it must be off before its definition is removed")
            self._remove(found)

    def power(self, domain: uuid.UUID) -> PowerState:
        with self._connection.using(f"read the state of VM {domain}") as conn:
            try:
                state, reason = self._find(conn, domain).state()
            except NotFound:
                return ABSENT
            except libvirt.libvirtError as exc:
                if code_of(exc) == libvirt.VIR_ERR_NO_DOMAIN:
                    return ABSENT
                raise
            return to_power(state, reason)

    def owned(self) -> Sequence[OwnedDomain]:
        with self._connection.using("list VMs") as conn:
            rows = conn.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_STATE, 0)
            found = [self._owned_domain(domain, stats) for domain, stats in rows]
        return [domain for domain in found if domain is not None]

    def watching(self, domain: uuid.UUID) -> AbstractContextManager[threading.Event]:
        return self._events.watching(domain)

    def on_power_event(self, callback: Callable[[uuid.UUID], None]) -> None:
        self._events.add_callback(callback)

    def trouble(self) -> str:
        return self._connection.trouble()

    # -- inside

    def _subscribe(self, conn: libvirt.virConnect) -> None:
        with contextlib.ExitStack():
            conn.domainEventRegisterAny(None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._on_lifecycle, None)
        self._events.some_were_lost()

    def _on_lifecycle(self, _conn: libvirt.virConnect, domain: libvirt.virDomain, _event: int, _detail: int, _: object) -> None:
        """libvirt's event thread: hands over."""
        self._events.happened(uuid.UUID(bytes=domain.UUID()))
