"""What some guests want beside the rest: a watchdog, a pointer for screens, Hyper-V's enlightenments. Pure."""

from __future__ import annotations

from lxml import etree

from virtshim.hypervisor.devices import root_bus

# As Microsoft recommends it for guests of other hypervisors; the times of a spin before it tells the host.
_ENLIGHTENMENTS = ("relaxed", "vapic", "vpindex", "runtime", "synic", "stimer", "frequencies")
_SPINS = 8191


def watchdog() -> etree._Element:
    element = etree.Element("watchdog", model="i6300esb", action="reset")
    element.append(root_bus.own(root_bus.Own.WATCHDOG))
    return element


def tablet() -> etree._Element:
    """Needs a USB controller."""
    return etree.Element("input", type="tablet", bus="usb")


def hyperv() -> etree._Element:
    element = etree.Element("hyperv", mode="custom")
    for name in _ENLIGHTENMENTS:
        etree.SubElement(element, name, state="on")
    etree.SubElement(element, "spinlocks", state="on", retries=str(_SPINS))
    return element
