"""One more serial port for the commands in a running container."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Protocol

from virtshim.domain.errors import NotFound
from virtshim.domain.ids import ContainerId
from virtshim.domain.layout import Layout
from virtshim.ports.records import Records


class VmPorts(Protocol):
    """Devices of a VM that runs. Errors: as `virtshim.ports.Hypervisor`."""

    def plug_in(self, domain: uuid.UUID, container: ContainerId, number: int, socket: str) -> None:
        """One more serial port for commands, as those of its VmSpec; it goes with the VM. WrongState if it is off; another
        error if it has room for no more. After an error a file may be at `socket`."""


@dataclass(frozen=True, slots=True)
class PlugExecPort:
    records: Records
    vms: VmPorts
    layout: Layout

    def plug(self, container: ContainerId, number: int) -> None:
        """Port `number` of its VM. Errors: NotFound, and those of `VmPorts`."""
        found = self.records.containers.get(container)
        if found is None:
            raise NotFound(f"no such container: {container}")
        socket = self.layout.exec_socket(container, number)
        self.vms.plug_in(found.domain_uuid, container, number, socket)
