"""Values about devices: what kubelet granted, what the VM gets, and known faults of PCI functions. No I/O."""

from __future__ import annotations

import datetime as dt
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from virtshim.model.errors import InvalidRequest
from virtshim.model.text import escaped

# Granted devices.
#
# Device nodes, CDI names and pod-resources entries are authoritative, because kubelet or its device plugin wrote them.
# An environment variable is a hint: a pod's author can write `PCIDEVICE_X` as well as a plugin can.

_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([01][0-9a-f])\.([0-7])", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class PciAddress:
    """The address of a PCI function. `domain`: 0 on most machines, above 0xffff behind some bridges (VMD)."""

    domain: int
    bus: int
    slot: int
    function: int

    @classmethod
    def parse(cls, text: str) -> PciAddress:
        """Reads `0000:3b:00.1`; without a domain it is 0. Raises InvalidRequest for anything else."""
        match = _PCI.fullmatch(text)
        if match is None:
            raise InvalidRequest(f"not a PCI address (DDDD:BB:SS.F, like 0000:3b:00.1): {text[:80]!r}")
        domain, *rest = match.groups()
        return cls(int(domain or "0", 16), *(int(part, 16) for part in rest))

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.slot:02x}.{self.function:x}"


@dataclass(frozen=True, slots=True)
class CriDevice:
    """A device node of ContainerConfig.devices. `permissions`: some of the letters r, w, m."""

    host_path: str
    container_path: str
    permissions: str = "rwm"


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """What CreateContainer says about devices. `cdi`: fully qualified names from the field and from the container's own
    annotations, never from the pod's, which its author writes. `envs`: hints only; a variable that occurs twice has
    both values, joined by a comma."""

    namespace: str
    pod: str
    container: str
    devices: tuple[CriDevice, ...] = ()
    cdi: tuple[str, ...] = ()
    envs: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class KubeletGrant:
    """What kubelet gave a container of one resource. `ids`: the device plugin's ids, such as PCI addresses, numbers of
    IOMMU groups, or UUIDs. `of_pod`: whether the ids are those of all containers of the pod, because kubelet does not
    list this container, which is an init container."""

    resource: str
    ids: tuple[str, ...]
    of_pod: bool = False


@dataclass(frozen=True, slots=True)
class PciFunction:
    """A PCI function for the VM. `resource`: kubelet's name for its resource, "" if unknown. `place`: text for people
    that names the network card and the number of the VF; "" for other functions."""

    address: PciAddress
    resource: str = ""
    place: str = field(default="", compare=False)

    @property
    def claim(self) -> str:
        return f"pci:{self.address}"


@dataclass(frozen=True, slots=True)
class MediatedDevice:
    """An mdev (vGPU). `uuid`: lower case with dashes."""

    uuid: str
    resource: str = ""

    @property
    def claim(self) -> str:
        return f"mdev:{self.uuid}"


@dataclass(frozen=True, slots=True)
class UsbDevice:
    """`bus` and `device` as in /dev/bus/usb/BBB/DDD."""

    bus: int
    device: int
    resource: str = ""

    @property
    def claim(self) -> str:
        return f"usb:{self.bus:03}/{self.device:03}"


@dataclass(frozen=True, slots=True)
class VdpaDevice:
    """A vhost-vdpa network device. `path`: /dev/vhost-vdpa-N."""

    path: str
    resource: str = ""

    @property
    def claim(self) -> str:
        return f"vdpa:{self.path}"


Passthrough: TypeAlias = PciFunction | MediatedDevice | UsbDevice | VdpaDevice


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A raw block volume for the VM, or a file in a volume that is a disk. `container_path`: its path in the pod, which
    becomes its name in the guest."""

    host_path: str
    container_path: str
    readonly: bool = False
    # The same for all its paths on the node; "" in records of versions that did not have it.
    identity: str = field(default="", compare=False)
    # Whether it is a file with a raw disk.
    is_file: bool = False

    @property
    def field_name(self) -> str:
        """The name of the field that asks for it."""
        path = escaped(self.container_path, 200)
        return f"config.mounts[{path}]" if self.is_file else f"config.devices[container_path {path}]"

    @property
    def is_root(self) -> bool:
        """Whether the VM boots from it."""
        return posixpath.normpath(self.container_path).strip("/") in ("", ".")


@dataclass(frozen=True, slots=True)
class GrantedDevices:
    """What a container gets. `passthrough`: in the order of guest addresses, by resource, then by host address.
    `not_given`: for people, what its CDI specifications have besides devices, which a container would get and a VM does
    not."""

    passthrough: tuple[Passthrough, ...] = ()
    blocks: tuple[BlockDevice, ...] = ()
    not_given: tuple[str, ...] = ()

    @property
    def root_volume(self) -> BlockDevice | None:
        """The volume that the VM boots from instead of a disk of its own."""
        return next((block for block in self.blocks if block.is_root), None)

    @property
    def data_volumes(self) -> tuple[BlockDevice, ...]:
        return tuple(block for block in self.blocks if not block.is_root)

    @property
    def notice(self) -> str:
        """For the container's status; "" if the guest has all that was granted."""
        if not self.not_given:
            return ""
        return (
            f"the guest does not have {', '.join(self.not_given)}: they are made for containers; what the device needs, such as "
            "drivers, must be in the image"
        )

    @property
    def claims(self) -> tuple[str, ...]:
        return tuple(device.claim for device in self.passthrough)

    @property
    def pins_memory(self) -> bool:
        """Whether a device reaches the guest's memory by DMA: all of it is then pinned from the start, and the guest
        cannot give any back."""
        return any(not isinstance(device, UsbDevice) for device in self.passthrough)


def volume_of_both(one: GrantedDevices, other: GrantedDevices) -> BlockDevice | None:
    """The first volume that both have and at least one writes to, so two VMs may not have it at once. None if there is
    no such volume."""
    return next(
        (
            block
            for block in one.blocks
            for another in other.blocks
            if _is_same(block, another) and not (block.readonly and another.readonly)
        ),
        None,
    )


def _is_same(one: BlockDevice, other: BlockDevice) -> bool:
    return one.host_path == other.host_path or (one.identity != "" and one.identity == other.identity)


@dataclass(frozen=True, slots=True)
class BorrowedDevice:
    """A PCI function that was taken from its driver. The `driver` ("" for none) gets it back when no container holds
    it."""

    address: PciAddress
    driver: str

    @property
    def claim(self) -> str:
        return PciFunction(self.address).claim


@dataclass(frozen=True, slots=True)
class DeviceErrors:
    """Uncorrectable PCI Express errors, counted since the kernel found the device."""

    fatal: int
    nonfatal: int


@dataclass(frozen=True, slots=True)
class CardFunction:
    """A PCI function of the host as it is now, for display: its driver, and its network card's settings for it."""

    # "" for none.
    driver: str
    # The interface of the network card that this is VF `number` of, "" if it is not a VF of a card.
    card: str = ""
    number: int = 0
    # The card's settings, by tapmanager's names (vlan, trust ...).
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)

    @property
    def vlan(self) -> str:
        """`100`, `100 (802.1ad)`; "" for none."""
        number, protocol = self.settings.get("vlan"), self.settings.get("protocol")
        return f"{number}" + (f" ({protocol})" if protocol not in (None, "802.1Q") else "") if number else ""


# Faults of a PCI function of the host between two VMs.


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """`reset_failed_at`: nanoseconds since the epoch; 0 if the last reset worked. `error`: the failure's message.
    `fatal`: the fatal errors counted at the last reset, which no longer matter."""

    address: PciAddress
    reset_failed_at: int = 0
    error: str = ""
    fatal: int = 0

    @property
    def claim(self) -> str:
        return PciFunction(self.address).claim

    @property
    def is_notable(self) -> bool:
        return bool(self.reset_failed_at or self.fatal)

    @property
    def fault(self) -> str:
        """Why no VM gets it, worded to follow the device's name; "" if no fault is known."""
        if not self.reset_failed_at:
            return ""
        at = dt.datetime.fromtimestamp(self.reset_failed_at // 10**9, dt.UTC)
        return f"could not be reset at {at:%Y-%m-%d %H:%M:%S} UTC ({self.error})"

    @property
    def remedy(self) -> str:
        return (
            f"reset it by hand (echo 1 > /sys/bus/pci/devices/{self.address}/reset), or power-cycle the node; virtshim retries "
            "every few minutes, and when a container is granted it"
        )


UNRESPONSIVE = "does not answer: its configuration space reads as all ones"
UNRESPONSIVE_REMEDY = (
    "check the kernel log; remove it and rescan the bus (echo 1 > /sys/bus/pci/devices/{address}/remove, then "
    "echo 1 > /sys/bus/pci/rescan), or power-cycle the node"
)


# The driver that takes any function.
VFIO_PCI: Final = "vfio-pci"


def is_vfio_driver(driver: str) -> bool:
    """vfio-pci, and vendor drivers that extend it: mlx5_vfio_pci, hisi-acc-vfio-pci. tapmanager, which is a separate
    program, decides in the same way."""
    return "vfio" in driver.replace("-", "_").split("_")
