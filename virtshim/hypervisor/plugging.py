"""Serial ports for a VM that runs, by way of libvirt: implements `virtshim.lifecycle.exec_ports.VmPorts`."""

from __future__ import annotations

import uuid

import libvirt
from lxml import etree

from virtshim.domain.ids import ContainerId
from virtshim.hypervisor import ownership
from virtshim.hypervisor.connection import Connection
from virtshim.hypervisor.devices.serial import exec_port_element
from virtshim.hypervisor.domain_xml import NodeProfile


class LibvirtPorts:
    """See the port. Thread-safe."""

    def __init__(self, connection: Connection, profile: NodeProfile) -> None:
        self._connection = connection
        self._profile = profile

    def plug_in(self, domain: uuid.UUID, container: ContainerId, number: int, socket: str) -> None:
        """See the port. Not into the definition: a VM that starts anew has as many ports as it was made with."""
        device = etree.tostring(exec_port_element(number, socket), encoding="unicode")
        with self._connection.using(f"plug a serial port into VM {domain}") as conn:
            ownership.find(conn, domain, self._profile.node, container).attachDeviceFlags(
                device, libvirt.VIR_DOMAIN_AFFECT_LIVE
            )
