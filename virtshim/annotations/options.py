"""VmOptions: what a pod's annotations ask of its VM, in one typed value; and what their readers share. Pure."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import HardwareOptions
from virtshim.model.network import Bandwidth, GuestPorts
from virtshim.model.vm import CpuDetails, CpuModel, DiskBus
from virtshim.seed.sources import DataSource, Encoding
from virtshim.volumes.empty_disks import EmptyDisk

# `annotations.parse` makes a VmOptions.

# The most serial ports for commands of a VM, including ports that are plugged in later. They are enough for 60 commands at
# once, or for 40 with input.
MAX_EXEC_PORTS = 120
# The most queues of a NIC. Few nodes have NICs that could use more.
MAX_NIC_QUEUES = 8


@dataclass(frozen=True, slots=True)
class VmOptions:
    # --- processors and memory

    # None: as the CPU limit says.
    vcpus: int | None = None
    # None: the node's default.
    max_vcpus: int | None = None
    # 0: the node's default.
    max_memory_bytes: int = 0
    cpu_model: CpuModel = CpuModel.DEFAULT
    cpu_details: CpuDetails = CpuDetails()

    # --- disks

    # None: the pod's default (`Sandbox.disk_bus`).
    disk_bus: DiskBus | None = None
    # 0: the image's own size.
    root_volume_bytes: int = 0
    # Whether one root disk stays for the pod's life, instead of a new one for each attempt.
    keep_root_disk: bool = False
    # The VM that the pod runs: a name that outlives the pod, or BY_POD_NAME. "" for a VM that ends with its pod.
    vm: str = ""
    # Whether a stop saves the guest's memory for the VM's next pod.
    save_on_stop: bool = False
    # The mount path of the volume that the VM is copied to when its pod has stopped, which the guest does not see. "" for none.
    state_volume: str = ""
    # The node that the VM is to come from, "" for none.
    restore_from: str = ""
    # Whether the guest may come from a template that has booted already.
    warm_start: bool = False
    # Whether a root disk on a volume is replaced if the image is another one.
    replace_root_disk: bool = False

    # Disks besides the root disk, removed with the container.
    empty_disks: tuple[EmptyDisk, ...] = ()

    # Mount paths of volumes with a disk image, which are disks in the guest.
    disk_images: tuple[str, ...] = ()

    # The mount path of the volume whose files are a CD-ROM for Windows' setup, "" for none.
    sysprep: str = ""

    # --- its machine

    hardware: HardwareOptions = HardwareOptions()

    # --- volumes

    # Whether volumes that kubelet writes (configMap, secret ...) are shared like others, not copied.
    share_kubelet_volumes: bool = False
    # Mount paths of emptyDirs with medium Memory that are in the guest's own memory.
    memory_volumes: tuple[str, ...] = ()

    # --- network

    # Which forged sender addresses are filtered; "": the node's default.
    network_filter: str = ""
    bandwidth: Bandwidth = Bandwidth()
    # Of each NIC; 0: as many as vCPUs.
    nic_queues: int = 0
    # The guest's ports in a pod with containers beside its VM; None: those that the pod declares.
    ports: GuestPorts | None = None
    # The container of such a pod that is the VM, "" for the one with a VM's image.
    vm_container: str = ""

    # --- what cloud-init tells the guest

    meta_data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    user_data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # Whether `user_data` and `ssh_keys` replace the data of their sources, instead of being merged over it.
    user_data_overwrite: bool = False
    # Replaces all generated user-data.
    user_data_script: str = field(default="", repr=False)
    ssh_keys: tuple[str, ...] = ()
    # Not read yet (`annotations.from_cluster`). With a key, the object's text is the script, in this encoding.
    user_data_source: DataSource | None = None
    user_data_encoding: Encoding = "plain"
    ssh_key_source: DataSource | None = None
    # Path in the guest -> content, from their source.
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    files_source: DataSource | None = None
    # The Ignition config that the guest reads through the firmware, "" for none.
    ignition: str = field(default="", repr=False)
    ignition_source: DataSource | None = None
    # Whether the seed is an OpenStack config drive instead of a NoCloud one.
    config_drive: bool = False
    # Whether the guest gets its addresses by DHCP alone, without a network-config.
    force_dhcp: bool = False

    # --- commands in the guest

    # Serial ports for commands at the start. A running command takes two or three, and each costs the guest half a MiB (4 MiB on
    # QEMU 10). Unless this is 0, more are plugged in when all are in use.
    exec_ports: int = 12
    # Whether the container's command runs in the guest; None: the node's default.
    run_command: bool | None = None
    # Whether the image's OCI config provides what the pod leaves out.
    use_image_config: bool = True

    # --- other

    # The UUID of the domain and of SMBIOS.
    system_uuid: uuid.UUID | None = None
    # Whether it has a video card, shown by a VNC server.
    vnc: bool = False


# A reader takes the options so far and an annotation's text, and returns the changed options. Its InvalidRequest has
# the fault and the remedy; the caller adds the annotation's name.
Reader = Callable[[VmOptions, str], VmOptions]


def shown(text: str) -> str:
    """The text, printable, and short enough to be one of several in a message."""
    return repr(text[:80])


def sets(field: str, read: Callable[[str], Any]) -> Reader:
    """A reader that sets this field to what `read` makes of the text."""
    return lambda options, text: dataclasses.replace(options, **{field: read(text)})


def one_of(values: Mapping[str, Any], fault: str) -> Callable[[str], Any]:
    """Word -> value. `fault`: what any other text is, and the remedy."""

    def read(text: str) -> Any:
        if text not in values:
            raise InvalidRequest(f"{shown(text)} is {fault}")
        return values[text]

    return read


flag = one_of({"": False, "true": True, "false": False}, "neither true nor false; write true, or remove it")
