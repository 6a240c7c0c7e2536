"""Serial ports of a running container's VM: one more for commands, and whether its agent has its own open."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.domain.errors import ShimError
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


@dataclass(frozen=True, slots=True)
class AgentPort:
    records: Records
    vms: VmPlugging

    def is_open(self, container: ContainerId) -> bool:
        """Whether something in its guest listens on the agent's port. True in doubt: then asking tells."""
        found = self.records.containers.get(container)
        if found is None:
            return True
        try:
            return self.vms.agent_listens(found.domain_uuid, container)
        except ShimError:
            return True
