"""What the calls on containers share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from virtshim.annotations.parse import parse_vm_options
from virtshim.containers.logs import ContainerLogs
from virtshim.devices.services import DeviceServices
from virtshim.disks.ports import RootDisks
from virtshim.model.container import Container
from virtshim.model.sandbox import Sandbox
from virtshim.model.sizing import NodeLimits, cgroup_of, nic_queues
from virtshim.pods.ports import VmCgroups
from virtshim.vm.ports import Hypervisor
from virtshim.volumes.pod_volumes import PodVolumes


@dataclass(frozen=True, slots=True)
class ContainerParts:
    """What a container has on the node beside its record: its VM, the VM's cgroup, its log, root disk, devices and volumes.
    `timeout`: seconds for a call to tapmanager."""

    hypervisor: Hypervisor
    cgroups: VmCgroups
    logs: ContainerLogs
    disks: RootDisks
    devices: DeviceServices
    volumes: PodVolumes
    timeout: float

    def open_cgroup(self, container: Container, sandbox: Sandbox, sizes: NodeLimits) -> None:
        """Makes the cgroup that QEMU starts in, and opens the pod's network for this one start."""
        group = cgroup_of(container, sandbox, container.resources, container.status.size, sizes)
        queues = nic_queues(parse_vm_options(sandbox.vm_annotations), container.status.size)
        group = dataclasses.replace(group, nic_queues=queues)
        if container.spec.passt_uid:
            passts = self.volumes.shares.passt_socket(container.id)
            group = dataclasses.replace(group, nic_queues=1, passt_socket=passts)
        self.cgroups.make(group, self.timeout)
