"""The device by which a guest has its pod's volumes. Pure."""

from __future__ import annotations

from lxml import etree

from virtshim.domain.volumes.shares import TAG
from virtshim.hypervisor.devices import root_bus
from virtshim.hypervisor.xmltext import absolute_path


def build(socket: str) -> etree._Element:
    """All volumes on one: libvirt is told where who serves them listens, and starts nobody itself."""
    element = etree.Element("filesystem", type="mount")
    etree.SubElement(element, "driver", type="virtiofs")
    etree.SubElement(element, "source", socket=absolute_path(socket, "socket of the volumes"))
    etree.SubElement(element, "target", dir=TAG)
    element.append(root_bus.own(root_bus.Own.VOLUMES))
    return element
