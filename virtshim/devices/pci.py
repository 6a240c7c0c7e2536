"""PCI functions and IOMMU groups, read from sysfs.

A group is the smallest unit that an IOMMU can isolate. VFIO gives a VM a whole group or nothing, so every other member has to be
idle or bound to a VFIO driver too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.devices.host_files import HostFiles
from virtshim.devices.values import PciAddress, is_vfio_driver
from virtshim.model.errors import InvalidRequest

FUNCTIONS: Final = "/sys/bus/pci/devices"
GROUPS: Final = "/sys/kernel/iommu_groups"
MDEVS: Final = "/sys/bus/mdev/devices"

# Host bridges and PCI-to-PCI bridges lead to functions and are never passed. 0x0680, which NVSwitch has, is an
# endpoint.
_BRIDGES: Final = frozenset({0x0600, 0x0604})
# Other members of a group may have these drivers, because these let no device do DMA.
_IDLE_DRIVERS: Final = frozenset({"", "pci-stub", "pcieport", "shpchp"})
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_VDPA: Final = re.compile(r"vdpa[0-9]+")
# The bytes of configuration space that all functions have and everybody may read.
_HEADER: Final = 64
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")


@dataclass(frozen=True, slots=True)
class PciFacts:
    """One function. `class_code`: 24 bits. `driver`: "" for none. `group`: None without an IOMMU. `node`: NUMA node,
    None if unknown. `physical`: the function that this is a VF of. `virtual`: its VFs. `parts`: mediated and vDPA
    devices made from it. `answers`: False if its registers read as all ones, as those of a device that has fallen off
    the bus."""

    address: PciAddress
    vendor: int
    device: int
    class_code: int
    driver: str
    is_vfio: bool
    group: int | None
    node: int | None
    physical: PciAddress | None
    virtual: tuple[PciAddress, ...]
    virtual_total: int
    interfaces: tuple[str, ...]
    has_reset: bool
    parts: tuple[str, ...]
    answers: bool

    @property
    def is_bridge(self) -> bool:
        return self.class_code >> 8 in _BRIDGES

    @property
    def is_idle(self) -> bool:
        """Whether no driver lets it do DMA, so that it is harmless as another member of a group."""
        return self.driver in _IDLE_DRIVERS or self.is_bridge


class PciBus:
    """Reads sysfs at each call."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def functions(self) -> list[PciFacts]:
        """All functions, by address."""
        found = (self.function(address) for address in addresses_of(self._files.names(FUNCTIONS)))
        return sorted((facts for facts in found if facts is not None), key=lambda facts: facts.address)

    def function(self, address: PciAddress) -> PciFacts | None:
        """None if there is no such function."""
        files, directory = self._files, f"{FUNCTIONS}/{address}"
        if not files.exists(directory):
            return None
        names = files.names(directory)
        driver = _last(files.target(f"{directory}/driver"))
        group = _last(files.target(f"{directory}/iommu_group"))
        node = _number(files.text(f"{directory}/numa_node"), 10)
        virtual = (files.target(f"{directory}/{name}") for name in names if name.startswith("virtfn"))
        return PciFacts(
            address=address,
            vendor=_number(files.text(f"{directory}/vendor"), 16) or 0,
            device=_number(files.text(f"{directory}/device"), 16) or 0,
            class_code=_number(files.text(f"{directory}/class"), 16) or 0,
            driver=driver,
            is_vfio=is_vfio_driver(driver) or bool(driver and files.names(f"{directory}/vfio-dev")),
            group=int(group) if group.isdecimal() else None,
            node=node if node is not None and node >= 0 else None,
            physical=last_address(files.target(f"{directory}/physfn")),
            virtual=tuple(sorted(found for path in virtual if (found := last_address(path)) is not None)),
            virtual_total=_number(files.text(f"{directory}/sriov_totalvfs"), 10) or 0,
            interfaces=tuple(files.names(f"{directory}/net")),
            has_reset="reset" in names,
            parts=tuple(name for name in names if is_uuid(name) or _VDPA.fullmatch(name)),
            answers=self._answers(directory),
        )

    def place(self, facts: PciFacts) -> str:
        """`VF 3 of ens1f0`, as `ip link` and the card's owner name it; "" for anything but a VF of a network card."""
        if facts.physical is None:
            return ""
        card, files = f"{FUNCTIONS}/{facts.physical}", self._files
        # In switchdev mode the card also has the interfaces that represent functions (pf0vf3, pf0sf8).
        own = [
            name
            for name in files.names(f"{card}/net")
            if not re.search("[vs]f", files.text(f"{card}/net/{name}/phys_port_name"))
        ]
        for name in files.names(card) if own else ():
            if name.startswith("virtfn") and last_address(files.target(f"{card}/{name}")) == facts.address:
                return f"VF {name.removeprefix('virtfn')} of {own[0]}"
        return ""

    def members(self, group: int) -> list[str]:
        """Names in an IOMMU group: PCI addresses and UUIDs of mediated devices. [] if there is no such group."""
        return self._files.names(f"{GROUPS}/{group}/devices")

    def groups(self) -> int:
        """How many groups an IOMMU isolates, 0 if none is in use. Groups of VFIO without an IOMMU are not isolated."""
        return sum(not self.is_unguarded(name) for name in self._files.names(GROUPS))

    def is_unguarded(self, group: int | str) -> bool:
        return self._files.text(f"{GROUPS}/{group}/name") == "vfio-noiommu"

    def mdev_exists(self, uuid: str) -> bool:
        return self._files.exists(f"{MDEVS}/{uuid}")

    def mdev_group(self, uuid: str) -> int | None:
        group = _last(self._files.target(f"{MDEVS}/{uuid}/iommu_group"))
        return int(group) if group.isdecimal() else None

    def _answers(self, directory: str) -> bool:
        """Checks the whole header, because SR-IOV specifies that the vendor of a VF reads as ones."""
        head = self._files.head(f"{directory}/config", _HEADER)
        return len(head) < _HEADER or head.strip(b"\xff") != b""


def is_uuid(text: str) -> bool:
    """Whether it looks like a mediated device's UUID, as the kernel writes it."""
    return _UUID.fullmatch(text) is not None


def addresses_of(names: Sequence[str]) -> list[PciAddress]:
    """The names that are PCI addresses."""
    found = []
    for name in names:
        with contextlib.suppress(InvalidRequest):
            found.append(PciAddress.parse(name))
    return found


def last_address(path: str) -> PciAddress | None:
    """The last function in a path below /sys/devices; the bridges on the way come before it."""
    found = _addresses(path)
    return found[-1] if found else None


def first_address(path: str) -> PciAddress | None:
    """The first function in such a path. It is on the root bus, and is the root port if more functions follow."""
    found = _addresses(path)
    return found[0] if found else None


def _addresses(path: str) -> list[PciAddress]:
    return [PciAddress.parse(part) for part in path.split("/") if _ADDRESS.fullmatch(part)]


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _number(text: str, base: int) -> int | None:
    try:
        return int(text, base)
    except ValueError:
        return None
