"""What the calls on containers share."""

from __future__ import annotations

from dataclasses import dataclass

from virtshim.containers.logs import ContainerLogs
from virtshim.devices.services import DeviceServices
from virtshim.disks.ports import RootDisks
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
