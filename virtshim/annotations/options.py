"""What readers of annotations have in common. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import HardwareOptions
from virtshim.model.network import Bandwidth
from virtshim.model.vm import CpuDetails, CpuModel, DiskBus
from virtshim.seed.sources import DataSource, Encoding
from virtshim.volumes.empty_disks import EmptyDisk

# VmOptions: what a pod's annotations ask of its virtual machine, in one typed value (`annotations.parse` makes it).

# Of a VM, what it starts with and what is plugged in later: 60 commands at once, 40 with input.
MAX_EXEC_PORTS = 120
# Of a NIC: more than a node's own NIC has use for few.
MAX_NIC_QUEUES = 8


@dataclass(frozen=True, slots=True)
class VmOptions:
    # --- processors and memory

    # None: from the CPU limit.
    vcpus: int | None = None
    # None: the node's choice.
    max_vcpus: int | None = None
    # 0: the node's choice.
    max_memory_bytes: int = 0
    cpu_model: CpuModel = CpuModel.DEFAULT
    cpu_details: CpuDetails = CpuDetails()

    # --- disks

    # None: the pod's own (`Sandbox.disk_bus`).
    disk_bus: DiskBus | None = None
    # 0: the image's own size.
    root_volume_bytes: int = 0
    # One root disk for the pod's life instead of a new one for each attempt.
    keep_root_disk: bool = False
    # A volume that the VM boots from, and whose root disk is of another image, gets the new one in its place.
    replace_root_disk: bool = False

    # Beside the root disk, and gone with the container.
    empty_disks: tuple[EmptyDisk, ...] = ()

    # Mount paths of volumes that hold a disk's image, and are that disk in the guest.
    disk_images: tuple[str, ...] = ()

    # The mount path of a volume whose files are a CD-ROM for Windows' setup; "" for none.
    sysprep: str = ""

    # --- its machine

    hardware: HardwareOptions = HardwareOptions()

    # --- volumes

    # What kubelet writes itself (configMap, secret ...) is shared as other volumes are, not copied.
    share_kubelet_volumes: bool = False
    # Mount paths of emptyDirs with medium Memory that are the guest's own.
    memory_volumes: tuple[str, ...] = ()

    # --- network

    # What of forged senders it cannot send; "": the node's choice.
    network_filter: str = ""
    bandwidth: Bandwidth = Bandwidth()
    # Of each NIC; 0: as many as vCPUs.
    nic_queues: int = 0

    # --- what cloud-init tells the guest

    meta_data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    user_data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # `user_data` and `ssh_keys` take the place of what their sources have, instead of being laid over it.
    user_data_overwrite: bool = False
    # Replaces every generated user-data.
    user_data_script: str = field(default="", repr=False)
    ssh_keys: tuple[str, ...] = ()
    # Not read yet (`annotations.from_cluster`). With a key that is the script, in this encoding.
    user_data_source: DataSource | None = None
    user_data_encoding: Encoding = "plain"
    ssh_key_source: DataSource | None = None
    # Path in the guest -> what is written there, from their source.
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    files_source: DataSource | None = None
    # What Ignition finds in the firmware; "" for none.
    ignition: str = field(default="", repr=False)
    ignition_source: DataSource | None = None
    # The seed is an OpenStack config drive, not a NoCloud one.
    config_drive: bool = False
    # The guest gets its addresses by DHCP alone: no network-config is written.
    force_dhcp: bool = False

    # --- commands in the guest

    # Serial ports that they talk through, two or three a running command; each costs the guest half a MiB. So many are there
    # from the start; unless it is 0, more are plugged in when all are in use.
    exec_ports: int = 12
    # Whether the container's command runs in the guest; None: the node's choice.
    run_command: bool | None = None
    # Whether what the image's OCI config says of a container holds where the pod leaves it out.
    use_image_config: bool = True

    # --- other

    # Becomes the domain's and the SMBIOS UUID.
    system_uuid: uuid.UUID | None = None
    # It has a video card whose picture a VNC server shows.
    vnc: bool = False


# A reader takes the options so far and the annotation's text, and gives the options with it; InvalidRequest carries what
# is wrong and the remedy, the caller adds the annotation's name.
Reader = Callable[[VmOptions, str], VmOptions]


def shown(text: str) -> str:
    """Printable, and short enough to be one of several in a message."""
    return repr(text[:80])


def flag(text: str) -> bool:
    if text not in ("true", "false", ""):
        raise InvalidRequest(f"{shown(text)} is neither true nor false; write true, or remove it")
    return text == "true"
