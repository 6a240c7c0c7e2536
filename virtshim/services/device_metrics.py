"""The metrics of host devices in VMs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from virtshim.domain.devices import DeviceErrors
from virtshim.services.metric_family import Family, Kind, Sample
from virtshim.services.usage import ContainerUse

# Conformance wants a sample of all that is described from every running container.
_NO_DEVICE: Final = (Sample(0, ("",)),)


def _errors(pick: Callable[[DeviceErrors], int]) -> Callable[[ContainerUse], Iterable[Sample]]:
    return lambda use: [Sample(pick(one), (str(address),)) for address, one in use.device_errors.items()] or _NO_DEVICE


CONTAINER = (
    Family(
        "virtshim_device_fatal_errors_total",
        Kind.COUNTER,
        "Fatal PCI Express errors of a host device in the VM, since the kernel found it.",
        _errors(lambda errors: errors.fatal),
        ("device",),
    ),
    Family(
        "virtshim_device_nonfatal_errors_total",
        Kind.COUNTER,
        "Uncorrectable but not fatal PCI Express errors of a host device in the VM, since the kernel found it.",
        _errors(lambda errors: errors.nonfatal),
        ("device",),
    ),
)
