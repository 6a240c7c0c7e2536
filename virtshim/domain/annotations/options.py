"""VmOptions: what a pod's annotations ask of its virtual machine, in one typed value (`annotations.parse` makes it)."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from virtshim.domain.vm import CpuModel, DiskBus

# Of a VM, what it starts with and what is plugged in later: 60 commands at once, 40 with input.
MAX_EXEC_PORTS = 120


class SeedType(enum.Enum):
    """The cloud-init data source that the seed ISO is made for."""

    NOCLOUD = "nocloud"


@dataclass(frozen=True, slots=True)
class VmOptions:
    """`vcpus` None: from the CPU limit. `max_vcpus` None, `max_memory_bytes` 0: the node's choice. `root_volume_bytes` 0: the
    image's own size. `user_data_script` replaces every generated user-data. `system_uuid` becomes the domain's and the
    SMBIOS UUID. `exec_ports`: serial ports that commands in the guest talk through, two or three a running command; each
    costs the guest half a MiB. So many are there from the start; unless it is 0, more are plugged in when all are in use.
    `keep_root_disk`: one root disk for the pod's life instead of a fresh one for each attempt.
    `run_command`: whether the container's command runs in the guest; None: the node's choice. `vnc`: it has a video card
    whose picture a VNC server shows."""

    vcpus: int | None = None
    max_vcpus: int | None = None
    max_memory_bytes: int = 0
    disk_bus: DiskBus = DiskBus.SCSI
    cpu_model: CpuModel = CpuModel.DEFAULT
    root_volume_bytes: int = 0
    system_uuid: uuid.UUID | None = None
    seed_type: SeedType = SeedType.NOCLOUD
    meta_data: Mapping[str, Any] = field(default_factory=dict)
    user_data: Mapping[str, Any] = field(default_factory=dict)
    user_data_overwrite: bool = False
    user_data_script: str = ""
    ssh_keys: tuple[str, ...] = ()
    force_dhcp: bool = False
    exec_ports: int = 12
    keep_root_disk: bool = False
    run_command: bool | None = None
    vnc: bool = False
