"""Collects the facts for the table of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from virtshim.config.settings import Settings
from virtshim.devices.attachable import AttachChecker, condition_faults, lockable
from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.host_files import HostFiles, NodeKind
from virtshim.devices.host_use import used_by_host
from virtshim.devices.pci import PciBus, PciFacts
from virtshim.devices.ports import DeviceDrivers
from virtshim.devices.resolve import device_rules
from virtshim.devices.values import DeviceCondition, PciAddress, PciFunction
from virtshim.model.errors import DeadlineExceeded, ShimError, Unavailable
from virtshim.preflight.devices import ExaminedFunction, HostDeviceSupport

# Seconds for tapmanager to answer about one function.
_ASK_TIMEOUT = 1.0
_UNSAFE = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode"


def candidates(
    settings: Settings,
    files: HostFiles,
    claims: Mapping[str, str],
    conditions: Mapping[str, DeviceCondition],
    drivers: DeviceDrivers,
) -> list[ExaminedFunction]:
    """All PCI functions except bridges, in the order of their addresses. The mappings give, by claim, the container that
    holds it and what resets have shown. `drivers` tells the VLANs of network cards' VFs, if it answers."""
    used = used_by_host(files)
    attachable = AttachChecker(files, device_rules(settings, files))
    bus = PciBus(files)
    found = []
    for facts in bus.functions():
        if not _is_bridge(facts):
            claim = PciFunction(facts.address).claim
            faults = (*attachable.function_faults(facts, used), *condition_faults(conditions.get(claim)))
            found.append(ExaminedFunction(facts, faults, claims.get(claim, ""), bus.place(facts)))
    vlans = _vlans([one.facts.address for one in found if one.place], drivers)
    return [dataclasses.replace(one, vlan=vlans.get(one.facts.address, "")) for one in found]


def _vlans(addresses: Sequence[PciAddress], drivers: DeviceDrivers) -> Mapping[PciAddress, str]:
    """The known VLANs. Stops when tapmanager cannot be reached."""
    told = {}
    for address in addresses:
        try:
            told[address] = drivers.function(address, _ASK_TIMEOUT).vlan
        except (Unavailable, DeadlineExceeded):
            break
        except ShimError:  # only this function failed
            continue
    return told


def surroundings(settings: Settings, files: HostFiles, claims: Mapping[str, str]) -> HostDeviceSupport:
    mine = settings.devices
    count, invalid = CdiDirectories(mine.cdi_dirs, files).survey()
    there = {f"pci:{facts.address}" for facts in PciBus(files).functions()}
    return HostDeviceSupport(
        groups=PciBus(files).groups(),
        has_vfio=files.node("/dev/vfio/vfio").kind is NodeKind.CHARACTER,
        without_iommu=files.text(_UNSAFE) in ("Y", "1"),
        lockable=lockable(files, settings.libvirt.uri),
        kubelet=mine.pod_resources_socket,
        kubelet_is_there=files.exists(mine.pod_resources_socket) if mine.pod_resources_socket else False,
        cdi_dirs=mine.cdi_dirs,
        specifications=count,
        invalid=invalid,
        lost={claim: owner for claim, owner in claims.items() if claim.startswith("pci:") and claim not in there},
    )


def _is_bridge(facts: PciFacts) -> bool:
    """Whether it is a bridge to another bus, including old kinds. 0x0680 is not: it is for devices without a class, such as
    NVSwitch."""
    return facts.class_code >> 16 == 0x06 and facts.class_code >> 8 != 0x0680
