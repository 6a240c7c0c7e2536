"""The serial console, the guest-agent channel and the ports for commands in the guest. Pure.

libvirt binds both sockets itself and hands QEMU the descriptors (the same for the log), so the directories need
not be open to the QEMU user.

libvirt treats a channel *it* knows as `org.qemu.guest_agent.0` as its own: it connects to the socket as soon as
the guest opens the port, and QEMU serves one client. So libvirt knows ours by another name, and only the guest
sees the agent's.
"""

from __future__ import annotations

from collections.abc import Sequence

from lxml import etree

from virtshim.domain.guest.command import exec_port
from virtshim.hypervisor.xmltext import absolute_path, socket_path

AGENT_ALIAS = "ua-agent"
AGENT_PORT = "org.qemu.guest_agent.0"
_HOST_NAME = "virtshim.agent"
# Of the controller's ports; 0 is a console's by convention.
_AGENT_NUMBER = 1


def console(socket: str, log: str) -> etree._Element:
    """QEMU listens on `socket` and appends every byte to `log`, whether or not anyone is connected."""
    element = etree.Element("serial", type="unix")
    etree.SubElement(element, "source", mode="bind", path=socket_path(socket, "console socket"))
    etree.SubElement(element, "log", file=absolute_path(log, "console log"), append="on")
    etree.SubElement(element, "target", type="isa-serial", port="0")
    return element


def agent(socket: str) -> etree._Element:
    element = etree.Element("channel", type="unix")
    etree.SubElement(element, "source", mode="bind", path=socket_path(socket, "guest agent socket"))
    etree.SubElement(element, "target", type="virtio", name=_HOST_NAME)
    element.append(_address(_AGENT_NUMBER))
    etree.SubElement(element, "alias", name=AGENT_ALIAS)
    return element


def exec_ports(sockets: Sequence[str]) -> Sequence[etree._Element]:
    """One virtio-serial port for each socket, named by its number."""
    return [exec_port_element(number, socket) for number, socket in enumerate(sockets)]


def exec_port_element(number: int, socket: str) -> etree._Element:
    element = etree.Element("channel", type="unix")
    etree.SubElement(element, "source", mode="bind", path=socket_path(socket, "exec socket"))
    etree.SubElement(element, "target", type="virtio", name=exec_port(number))
    element.append(_address(_AGENT_NUMBER + 1 + number))
    return element


def _address(port: int) -> etree._Element:
    """Fixed, for the scripts in the guest: without udev they find a port by its number, which is in its device's name."""
    return etree.Element("address", type="virtio-serial", controller="0", bus="0", port=str(port))
