"""Devices that kubelet granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from virtshim.devices.values import (
    BorrowedDevice,
    CardFunction,
    DeviceCondition,
    DeviceErrors,
    DeviceRequest,
    GrantedDevices,
    KubeletGrant,
    Passthrough,
    PciAddress,
    UsbDevice,
)


class PodResources(Protocol):
    """kubelet's own list of what it granted."""

    def granted(self, namespace: str, pod: str, container: str) -> tuple[KubeletGrant, ...]:
        """() if kubelet knows of none. kubelet lists no init containers, whose devices the others get after them: for one
        that it does not list, what all of the pod got. Raises Unavailable if kubelet cannot be asked."""

    def own_containers(self, namespace: str, pod: str) -> tuple[str, ...] | None:
        """Names of the pod's regular containers and native sidecars, with devices or without. kubelet lists them before it makes
        the pod's sandbox, and never lists init containers that end, or ephemeral containers. None: kubelet knows no such pod, or
        there is no kubelet. Raises Unavailable if kubelet does not answer."""


class Devices(Protocol):
    """The devices behind granted nodes and names, and whether a VM can have them."""

    def resolve(self, request: DeviceRequest) -> GrantedDevices:
        """Raises InvalidRequest, with every fault in one message, for what no VM can have and for a hint at a device that
        was not granted; Unavailable if kubelet had to be asked and could not be."""

    def own_containers(self, namespace: str, pod: str) -> tuple[str, ...] | None:
        """As `PodResources.own_containers`; None also if kubelet is not asked, or does not answer."""

    def check(self, devices: Sequence[Passthrough], *, guest_memory: int = 0) -> None:
        """Whether each can be attached now: IOMMU, driver, group, node, memory that QEMU may lock. Raises WrongState, with
        every fault and its remedy in one message.

        `guest_memory`: bytes, the most that the VM can grow to; 0 leaves that out. A function at a driver that is not VFIO's is
        no fault where `devices.bind` is set: whoever attaches it binds it first."""


class DeviceDrivers(Protocol):
    """The drivers of this node's PCI functions and USB devices. Errors: NotFound, WrongState (no such driver is loaded),
    Unavailable, InternalError (a driver did not take the device), DeadlineExceeded."""

    def driver(self, address: PciAddress, timeout: float) -> str:
        """Its name, "" if it has none."""

    def function(self, address: PciAddress, timeout: float) -> CardFunction:
        """With what is set for it on its network card, if it is a VF of one."""

    def bind(self, address: PciAddress, driver: str, timeout: float) -> None:
        """From now on it has that driver; "" for none. Nothing changes if it has it."""

    def reset(self, address: PciAddress, timeout: float) -> bool:
        """False if it has no way to be reset."""

    def probe_usb(self, device: UsbDevice, timeout: float) -> Sequence[str]:
        """As if it had just been plugged in: each of its interfaces without a driver gets the one that wants it. Which got
        one."""


class BorrowedTable(Protocol):
    """Devices that were taken from their drivers, by claim; kept as `virtshim.store.ports.Table` keeps records."""

    def add(self, record: BorrowedDevice) -> None: ...

    def delete(self, key: str) -> None: ...

    def get(self, key: str) -> BorrowedDevice | None: ...

    def all(self) -> Sequence[BorrowedDevice]: ...


class ConditionTable(Protocol):
    """What is known against functions, by claim; kept as `virtshim.store.ports.Table` keeps records."""

    def put(self, record: DeviceCondition) -> None: ...

    def delete(self, key: str) -> None: ...

    def get(self, key: str) -> DeviceCondition | None: ...

    def all(self) -> Sequence[DeviceCondition]: ...


class DeviceErrorCounts(Protocol):
    """What the kernel counts of PCI functions' errors."""

    def errors(self, address: PciAddress) -> DeviceErrors | None:
        """None if it counts nothing for that one, as for virtual functions. Raises nothing."""
