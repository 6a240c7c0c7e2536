"""The owner mark: a metadata element in the domain XML that says which node, container and sandbox a domain is
for.

Only a domain with this element *and* this node's id is ours; everything else on the host is foreign and never
touched. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from lxml import etree

from virtshim.domain.errors import InvalidRequest
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.hypervisor.xmltext import printable

# libvirt looks metadata up by this URI. It is in the definition of every VM: it must never change.
NAMESPACE = "https://virtshim.io/domain/1"
_PREFIX = "virtshim"

# The records' copy has a URI of its own: the mark is read for each VM in each list, and stays short. Never to change either.
RECORD_NAMESPACE = "https://virtshim.io/record/1"


@dataclass(frozen=True, slots=True)
class OwnerMark:
    node: str
    container_id: ContainerId
    sandbox_id: SandboxId


def to_element(mark: OwnerMark, record: str = "") -> etree._Element:
    """The whole `<metadata>` element. `record` is what the pod's records can be made anew from; "" leaves it out."""
    metadata = etree.Element("metadata")
    owner = etree.SubElement(metadata, f"{{{NAMESPACE}}}owner", nsmap={_PREFIX: NAMESPACE})
    owner.set("node", printable(mark.node, "node id"))
    owner.set("container", mark.container_id.value)
    owner.set("sandbox", mark.sandbox_id.value)
    if record:
        copy = etree.SubElement(
            metadata, f"{{{RECORD_NAMESPACE}}}record", nsmap={f"{_PREFIX}-record": RECORD_NAMESPACE}
        )
        copy.text = printable(record, "record")
    return metadata


def node_of(xml: str) -> str:
    """The node id in an `<owner>` element as libvirt returns it (it drops the namespace); "" if there is none."""
    return _parsed(xml).get("node", "")


def from_text(xml: str) -> OwnerMark:
    """The mark in an `<owner>` element as libvirt returns it. InvalidRequest if it is damaged."""
    owner = _parsed(xml)
    return OwnerMark(
        node=owner.get("node", ""),
        container_id=ContainerId(owner.get("container", "")),
        sandbox_id=SandboxId(owner.get("sandbox", "")),
    )


def _parsed(xml: str) -> etree._Element:
    # No entities, no network: the text comes from libvirt, but others may have written it there.
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    try:
        return etree.fromstring(xml.encode(), parser)
    except etree.XMLSyntaxError as exc:
        raise InvalidRequest(f"the owner mark is not XML: {exc}") from exc
