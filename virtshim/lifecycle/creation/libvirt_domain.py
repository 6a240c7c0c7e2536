"""Step: the libvirt domain is defined with what the steps before it have made, and its records are kept beside its disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from virtshim.domain.container import Container
from virtshim.domain.hardware.numa import HostNodes, cells_for
from virtshim.domain.layout import Layout, nvram_of, share_socket, vnc_socket
from virtshim.domain.sizing import NodeLimits, limits_for
from virtshim.domain.vm import VmSpec
from virtshim.lifecycle.creation.places import KeptPlaces
from virtshim.lifecycle.creation.step import Draft
from virtshim.ports.hypervisor import Hypervisor
from virtshim.ports.recovery import RecordCopies, StateRecords
from virtshim.primitives import observed
from virtshim.primitives.live import Live


@dataclass(frozen=True, slots=True)
class Domain:
    measured_as: ClassVar[observed.Step] = observed.Step.DEFINE
    hypervisor: Hypervisor
    records: StateRecords
    copies: RecordCopies
    layout: Layout
    sizes: Live[NodeLimits]
    tapmanager_socket: str
    places: KeptPlaces
    host_nodes: Callable[[], HostNodes]

    def make(self, draft: Draft) -> Draft:
        # A VM that is there without a record is known by it.
        self.copies.keep(draft.container.id, self.records.to_text(draft.sandbox, draft.container))
        self.places.refuse_anothers_tpm(draft)
        self.hypervisor.define(self._vm(draft))
        # Not before: what is noted is removed with the pod, and a UUID that is a foreign VM's has just been refused.
        self.places.keep_tpm(draft)
        return draft

    def undo(self, container: Container) -> None:
        self.hypervisor.undefine(container.domain_uuid, container.id)

    def _vm(self, draft: Draft) -> VmSpec:
        container, sandbox, options = draft.container, draft.sandbox, draft.options
        size, firmware = container.status.size, options.hardware.firmware
        network = sandbox.network
        disk_bus = options.disk_bus or sandbox.disk_bus
        machine, numbers = self.places.of(draft, disk_bus)
        return VmSpec(
            uuid=container.domain_uuid,
            name=container.domain_name,
            container_id=container.id,
            sandbox_id=sandbox.id,
            size=size,
            disk_bus=disk_bus,
            disks=draft.disks,
            console_socket=self.layout.console_socket(container.id),
            console_log=self.layout.console_log(container.id),
            agent_socket=self.layout.agent_socket(container.id),
            exec_sockets=tuple(self.layout.exec_socket(container.id, n) for n in range(options.exec_ports)),
            shares_socket=share_socket(self.layout, container.id) if container.spec.volumes else "",
            vnc_socket=vnc_socket(self.layout, container.id) if options.vnc else "",
            limits=limits_for(container.resources, sandbox.overhead, size, self.sizes.now),
            cgroup_parent=container.spec.cgroup_parent,
            cells=cells_for(container.resources, size, self.host_nodes),
            cpu_model=options.cpu_model,
            cpu_details=options.cpu_details,
            smbios_uuid=options.system_uuid is not None,
            title=f"{sandbox.key.namespace}/{sandbox.key.name}/{container.name.name}",
            fetch_key=network.fetch_key if network else "",
            tapmanager_socket=self.tapmanager_socket if network else "",
            granted=container.granted,
            uid=container.spec.uid,
            ignition_file=draft.ignition_file,
            sysprep_iso=draft.sysprep_iso,
            kernel_file=draft.kernel_file,
            initrd_file=draft.initrd_file,
            machine=machine,
            numbers=numbers,
            hardware=options.hardware,
            nvram=nvram_of(self.layout, container, firmware) if firmware.is_uefi else "",
            firmware_files=self.places.firmware(draft),
            keeps_tpm=container.spec.pod_disk != "",
            owns_tpm=self.places.owns_tpm(draft),
        )
