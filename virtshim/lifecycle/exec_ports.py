"""One more serial port for the commands in a running container."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.domain.ids import ContainerId
from virtshim.domain.layout import Layout
from virtshim.ports.hypervisor import VmPlugging
from virtshim.ports.records import Records
from virtshim.primitives.existing import existing_container


@dataclass(frozen=True, slots=True)
class PlugExecPort:
    records: Records
    vms: VmPlugging
    layout: Layout

    def plug(self, container: ContainerId, number: int) -> None:
        """Port `number` of its VM. Errors: NotFound, and those of `VmPlugging`."""
        found = existing_container(self.records, container)
        socket = self.layout.exec_socket(container, number)
        self.vms.plug_in(found.domain_uuid, container, number, socket)
