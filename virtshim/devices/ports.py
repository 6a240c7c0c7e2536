"""Ports to the host's devices: kubelet's grants, drivers, and the tables that record devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from virtshim.devices.values import (
    CardFunction,
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
        """() if kubelet lists nothing. kubelet lists no init containers; their devices pass on to the pod's other
        containers. For a container that is not listed this returns what all of the pod got. Raises Unavailable if
        kubelet cannot be asked."""

    def own_containers(self, namespace: str, pod: str) -> tuple[str, ...] | None:
        """Names of the pod's regular containers and native sidecars, with devices or without. kubelet lists them before
        it makes the pod's sandbox, and never lists init containers that end, or ephemeral containers. None if kubelet
        does not know the pod, or there is no kubelet. Raises Unavailable if kubelet does not answer."""


class Devices(Protocol):
    """The devices behind granted nodes and names, and whether a VM can have them now."""

    def resolve(self, request: DeviceRequest) -> GrantedDevices:
        """Raises InvalidRequest, with every fault in one message, for devices that no VM can have and for a hint at a
        device without a grant; Unavailable if kubelet must be asked and cannot be."""

    def own_containers(self, namespace: str, pod: str) -> tuple[str, ...] | None:
        """Like `PodResources.own_containers`; None also if kubelet is not asked, or does not answer."""

    def check(self, devices: Sequence[Passthrough], *, guest_memory: int = 0) -> None:
        """Raises WrongState, with every fault and remedy in one message, if a device cannot be attached now: checks
        IOMMU, driver, group, node, and the memory that QEMU may lock.

        `guest_memory`: the most bytes that the VM can grow to; 0 skips the check. With `devices.bind` a function may
        have a driver that is not VFIO's, because it is bound to VFIO before it is attached."""


class DeviceDrivers(Protocol):
    """The drivers of this node's PCI functions and USB devices. Errors: NotFound, WrongState (no such driver is loaded),
    Unavailable, InternalError (a driver did not take the device), DeadlineExceeded."""

    def driver(self, address: PciAddress, timeout: float) -> str:
        """The driver's name, "" for none."""

    def function(self, address: PciAddress, timeout: float) -> CardFunction:
        """The function, with the settings that its network card has for it, if it is a VF of a card."""

    def bind(self, address: PciAddress, driver: str, timeout: float) -> None:
        """Gives it that driver, "" for none. Nothing changes if it has the driver already."""

    def reset(self, address: PciAddress, timeout: float) -> bool:
        """False if the function cannot be reset."""

    def probe_usb(self, device: UsbDevice, timeout: float) -> Sequence[str]:
        """Gives each interface without a driver the one that wants it, as if the device had just been plugged in.
        Returns the interfaces that got one."""


class DeviceErrorCounts(Protocol):
    """The kernel's error counts of PCI functions."""

    def errors(self, address: PciAddress) -> DeviceErrors | None:
        """None if the kernel has no counts of that function, for example of a virtual function. Raises nothing."""
