"""More Protocols between the services and the outside, by the rules of `virtshim.ports`: devices that kubelet granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from virtshim.domain.devices import DeviceRequest, GrantedDevices, Passthrough


class Devices(Protocol):
    """What is behind granted nodes and names, and whether a VM can have it."""

    def resolve(self, request: DeviceRequest) -> GrantedDevices:
        """Raises InvalidRequest, with every fault in one message, for what no VM can have and for a hint at a device that
        was not granted; Unavailable if kubelet had to be asked and could not be."""

    def check(self, devices: Sequence[Passthrough]) -> None:
        """Whether each can be attached now: IOMMU, driver, group, node. Raises WrongState, with every fault and its remedy
        in one message."""
