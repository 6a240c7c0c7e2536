"""Reads and writes libvirt's XML. Pure."""

from __future__ import annotations

from typing import Final
from xml.etree.ElementTree import Element, ParseError, fromstring, register_namespace, tostring

QEMU_NAMESPACE: Final = "http://libvirt.org/schemas/domain/qemu/1.0"
# Otherwise a definition that is read and written again would call it `ns0`.
register_namespace("qemu", QEMU_NAMESPACE)


def qemu_tag(name: str) -> str:
    """The tag of one of QEMU's own elements."""
    return f"{{{QEMU_NAMESPACE}}}{name}"


def parsed(text: str) -> Element:
    """The root, without comments. Raises ValueError for text that is not XML, and for a document type: libvirt never writes one,
    and its entities could name files or fill the memory."""
    if "<!DOCTYPE" in text:
        raise ValueError("XML with a document type, which libvirt never writes")
    try:
        return fromstring(text)  # noqa: S314  there are no entities without a document type
    except ParseError as exc:
        raise ValueError(f"not XML: {exc}") from exc


def text_of(element: Element) -> str:
    return tostring(element, encoding="unicode")
