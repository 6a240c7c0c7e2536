"""The small devices every VM gets. Pure."""

from __future__ import annotations

from lxml import etree

from virtshim.domain.annotations.options import MAX_EXEC_PORTS
from virtshim.hypervisor.devices import root_bus

BALLOON_STATS_SECONDS = 10


def entropy() -> etree._Element:
    """virtio-rng fed from /dev/urandom: first boots do not wait for entropy."""
    element = etree.Element("rng", model="virtio")
    etree.SubElement(element, "backend", model="random").text = "/dev/urandom"
    element.append(root_bus.own(root_bus.Own.ENTROPY))
    return element


def balloon(*, holds_back: bool, pinned: bool) -> etree._Element:
    """Gives memory readings, and hands pages the guest has freed back to the host. One that `holds_back` memory for later
    must not let go of it by itself: the VM's cgroup has no room for it. Of `pinned` memory nothing can be handed back: a
    device still writes to what it was told of."""
    deflates = "off" if holds_back or pinned else "on"
    reports = "off" if pinned else "on"
    element = etree.Element("memballoon", model="virtio", autodeflate=deflates, freePageReporting=reports)
    etree.SubElement(element, "stats", period=str(BALLOON_STATS_SECONDS))
    element.append(root_bus.own(root_bus.Own.BALLOON))
    return element


def panic() -> etree._Element:
    """pvpanic: a guest kernel tells of its panic instead of spinning or booting again."""
    return etree.Element("panic", model="isa")


def no_usb() -> etree._Element:
    """q35 gets a USB controller unless told otherwise; nothing here is on USB."""
    return etree.Element("controller", type="usb", index="0", model="none")


def virtio_serial() -> etree._Element:
    """With room for what is plugged in later: libvirt cannot plug in another of these. Port 0 stays free, as a console's by
    convention, and one is the guest agent's."""
    element = etree.Element("controller", type="virtio-serial", index="0", ports=str(MAX_EXEC_PORTS + 2))
    element.append(root_bus.own(root_bus.Own.SERIAL))
    return element
