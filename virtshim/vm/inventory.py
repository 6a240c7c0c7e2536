"""Lists the VMs and reads their definitions; implements `virtshim.store.ports.VmInventory`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import libvirt
import structlog

from virtshim.model.errors import InternalError, InvalidRequest, ShimError
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.vm import OwnedDomain
from virtshim.store.ports import DomainInventory, DomainMetadata
from virtshim.vm import ownership
from virtshim.vm.elements.text import vm_uid_in
from virtshim.vm.errors import message_of
from virtshim.vm.own_domains import OwnDomains
from virtshim.vm.xml_text import parsed, qemu_tag

log = structlog.get_logger(__name__)


class LibvirtInventory(OwnDomains):
    def take(self) -> DomainInventory:
        owned: list[OwnedDomain] = []
        unreadable: list[str] = []
        others: dict[ContainerId, str] = {}
        sandboxes: set[SandboxId] = set()
        with self._connection.using("list VMs") as conn:
            for domain, stats in conn.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_STATE, 0):
                try:
                    owner = ownership.owner_of(domain)
                except (libvirt.libvirtError, InvalidRequest) as exc:
                    if not conn.isAlive():
                        raise
                    why = message_of(exc) if isinstance(exc, libvirt.libvirtError) else str(exc)
                    log.warning("libvirt.domain.unreadable", name=domain.name(), error=why)
                    unreadable.append(domain.name())
                    continue
                if owner is None:
                    continue
                if owner.node != self._profile.node:
                    others[owner.container_id] = owner.node
                    sandboxes.add(owner.sandbox_id)
                    continue
                owned.append(ownership.owned(domain, owner, stats))
        return DomainInventory(owned, unreadable, others, frozenset(sandboxes))

    def take_records_out(self, keep: Callable[[ContainerId, str], None]) -> None:
        with self._connection.using("look for records in definitions") as conn:
            for domain in conn.listAllDomains():
                try:
                    owner = ownership.owner_of(domain)
                    if owner is None or owner.node != self._profile.node:
                        continue
                    if record := ownership.carried_record(domain):
                        keep(owner.container_id, record)
                        _forget_record(domain)
                except (libvirt.libvirtError, ShimError) as exc:
                    if not conn.isAlive():
                        raise
                    why = message_of(exc) if isinstance(exc, libvirt.libvirtError) else str(exc)
                    log.warning("libvirt.domain.record_not_moved", name=domain.name(), error=why)

    def domain_metadata(self, domain: uuid.UUID) -> DomainMetadata:
        with self._using(domain, "read the definition of") as own:
            text = own.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE)
        try:
            found = parsed(text)
        except ValueError as exc:
            raise InternalError(f"the definition of VM {domain} cannot be read: {exc}") from exc
        key = found.find(f"{qemu_tag('commandline')}/*[@name='VIRTSHIM_FETCH_KEY']")
        console = found.find("devices/serial/log")
        return DomainMetadata(
            title=found.findtext("title", ""),
            uid=vm_uid_in(text),
            fetch_key="" if key is None else key.get("value", ""),
            # QEMU makes its console's log when it starts.
            has_run=console is not None and os.path.exists(console.get("file", "")),
        )


def _forget_record(domain: libvirt.virDomain) -> None:
    where = libvirt.VIR_DOMAIN_AFFECT_CONFIG
    if domain.isActive():
        where |= libvirt.VIR_DOMAIN_AFFECT_LIVE
    nothing: Any = None  # removes the element, although libvirt-python's annotation forbids None
    domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, nothing, nothing, ownership.RECORD_NAMESPACE, where)
