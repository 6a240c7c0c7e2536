"""The owner mark in domains' definitions, and how to find this node's domains by it.

The mark is a metadata element that names a domain's node, container and sandbox. Only a domain with the mark *and* this node's id
is ours. All others are treated as absent, whatever their UUID (a pod may choose one), and never touched.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element, SubElement, register_namespace

import libvirt

from virtshim.model.errors import InvalidRequest, NotFound
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.vm import OwnedDomain
from virtshim.vm.elements.text import printable
from virtshim.vm.errors import code_of
from virtshim.vm.power import to_power
from virtshim.vm.xml_text import parsed

# libvirt looks metadata up by this URI. It must never change, because the definition of every VM has it.
NAMESPACE = "https://virtshim.io/domain/1"
register_namespace("virtshim", NAMESPACE)

# Earlier versions wrote a copy of the pod's records here, where every local user may read it.
RECORD_NAMESPACE = "https://virtshim.io/record/1"

_NO_MARK = frozenset({libvirt.VIR_ERR_NO_DOMAIN_METADATA, libvirt.VIR_ERR_NO_DOMAIN})


@dataclass(frozen=True, slots=True)
class OwnerMark:
    node: str
    container_id: ContainerId
    sandbox_id: SandboxId


def metadata_element(mark: OwnerMark) -> Element:
    """The whole `<metadata>` element."""
    metadata = Element("metadata")
    owner = SubElement(metadata, f"{{{NAMESPACE}}}owner")
    owner.set("node", printable(mark.node, "node id"))
    owner.set("container", mark.container_id.value)
    owner.set("sandbox", mark.sandbox_id.value)
    return metadata


def node_of(xml: str) -> str:
    """The node id in an `<owner>` element as libvirt returns it, without the namespace; "" if there is none."""
    return _parsed(xml).get("node", "")


def read_mark(xml: str) -> OwnerMark:
    """The mark in an `<owner>` element as libvirt returns it. InvalidRequest if it is damaged."""
    owner = _parsed(xml)
    return OwnerMark(
        node=owner.get("node", ""),
        container_id=ContainerId(owner.get("container", "")),
        sandbox_id=SandboxId(owner.get("sandbox", "")),
    )


def _parsed(xml: str) -> Element:
    try:
        return parsed(xml)
    except ValueError as exc:
        raise InvalidRequest(f"the owner mark cannot be read: {exc}") from exc


def find(
    conn: libvirt.virConnect, domain: uuid.UUID, node: str, container: ContainerId | None = None
) -> libvirt.virDomain:
    """Raises NotFound, also if `container` is given and the domain is another's; libvirtError, including NO_DOMAIN."""
    found = conn.lookupByUUID(domain.bytes)
    if not is_ours(found, node):
        raise NotFound(f"VM {domain} is not one of this node's")
    if container is not None and read_mark(mark_text(found) or "").container_id != container:
        raise NotFound(f"VM {domain} is not that of container {container}")
    return found


def is_ours(domain: libvirt.virDomain, node: str) -> bool:
    text = mark_text(domain)
    if text is None:
        return False
    try:
        return node_of(text) == node
    except InvalidRequest:
        return False


def mark_text(domain: libvirt.virDomain) -> str | None:
    """The owner mark; None if there is none, or the domain has just gone. Raises any other error, because an unreadable mark is
    not an absent one."""
    try:
        return domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE)
    except libvirt.libvirtError as exc:
        if code_of(exc) in _NO_MARK:
            return None
        raise


def owner_of(domain: libvirt.virDomain) -> OwnerMark | None:
    """None for a foreign domain, and for one that has just gone. Raises libvirtError, InvalidRequest."""
    text = mark_text(domain)
    return None if text is None else read_mark(text)


def carried_record(domain: libvirt.virDomain) -> str:
    """The records in a definition that an earlier version wrote; "" if there are none. Raises libvirtError, InvalidRequest."""
    try:
        found = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, RECORD_NAMESPACE)
    except libvirt.libvirtError as exc:
        if code_of(exc) in _NO_MARK:
            return ""
        raise
    return _parsed(found).text or ""


def owned(domain: libvirt.virDomain, owner: OwnerMark, stats: Mapping[str, Any]) -> OwnedDomain:
    """`stats`: libvirt's statistics of the domain's state."""
    return OwnedDomain(
        uuid=uuid.UUID(domain.UUIDString()),
        name=domain.name(),
        container_id=owner.container_id,
        sandbox_id=owner.sandbox_id,
        state=to_power(stats["state.state"], stats["state.reason"]),
    )
