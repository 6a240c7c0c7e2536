"""Finds domains owned by this node; all others are treated as absent, whatever their UUID (a pod may choose one)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import libvirt

from virtshim.domain.errors import InvalidRequest, NotFound
from virtshim.domain.ids import ContainerId
from virtshim.domain.vm import OwnedDomain
from virtshim.hypervisor import owner_mark
from virtshim.hypervisor.errors import code_of
from virtshim.hypervisor.power import to_power

_NO_MARK = frozenset({libvirt.VIR_ERR_NO_DOMAIN_METADATA, libvirt.VIR_ERR_NO_DOMAIN})


def find(
    conn: libvirt.virConnect, domain: uuid.UUID, node: str, container: ContainerId | None = None
) -> libvirt.virDomain:
    """Raises NotFound, also for a domain of another container than `container`, if that is given; libvirtError, NO_DOMAIN
    included."""
    found = conn.lookupByUUID(domain.bytes)
    if not is_ours(found, node):
        raise NotFound(f"VM {domain} is not one of this node's")
    if container is not None and owner_mark.from_text(mark_text(found) or "").container_id != container:
        raise NotFound(f"VM {domain} is not that of container {container}")
    return found


def is_ours(domain: libvirt.virDomain, node: str) -> bool:
    text = mark_text(domain)
    if text is None:
        return False
    try:
        return owner_mark.node_of(text) == node
    except InvalidRequest:
        return False


def mark_text(domain: libvirt.virDomain) -> str | None:
    """The owner mark; None if there is none or the domain has just gone. Any other error is raised: a mark that
    cannot be read is not an absent one."""
    try:
        return domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, owner_mark.NAMESPACE)
    except libvirt.libvirtError as exc:
        if code_of(exc) in _NO_MARK:
            return None
        raise


def owned(domain: libvirt.virDomain, owner: owner_mark.OwnerMark, stats: Mapping[str, Any]) -> OwnedDomain:
    """`stats`: libvirt's, of its state."""
    return OwnedDomain(
        uuid=uuid.UUID(domain.UUIDString()),
        name=domain.name(),
        container_id=owner.container_id,
        sandbox_id=owner.sandbox_id,
        state=to_power(stats["state.state"], stats["state.reason"]),
    )
