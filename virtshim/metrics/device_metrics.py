"""The metrics of host devices: of those in VMs, and of those that a pod's VMs have or had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from virtshim.domain.devices.granted import DeviceErrors, PciAddress
from virtshim.metrics.family import Family, Kind, Sample
from virtshim.metrics.usage import ContainerUsage, SandboxUsage
from virtshim.passthrough.health import DeviceStatus
from virtshim.passthrough.resets import DONE

# Conformance wants a sample of all that is described from every running pod.
_NO_DEVICE: Final = (Sample(0, ("",)),)


def _errors(pick: Callable[[DeviceErrors], int]) -> Callable[[ContainerUsage], Iterable[Sample]]:
    return lambda use: (
        [
            Sample(pick(device.errors), (str(address),))
            for address, device in use.devices.items()
            if device.errors is not None
        ]
        or _NO_DEVICE
    )


def _of_pod(use: SandboxUsage) -> dict[PciAddress, DeviceStatus]:
    """Each once, though several of its containers had it."""
    return {address: device for container in use.containers for address, device in container.devices.items()}


def _resets(use: SandboxUsage) -> Iterable[Sample]:
    found = [
        Sample(count, (str(address), result))
        for address, device in _of_pod(use).items()
        for result, count in device.resets.items()
    ]
    return found or (Sample(0, ("", DONE)),)


def _broken(use: SandboxUsage) -> Iterable[Sample]:
    return [Sample(int(device.broken), (str(address),)) for address, device in _of_pod(use).items()] or _NO_DEVICE


CONTAINER = (
    Family(
        "virtshim_device_fatal_errors_total",
        Kind.COUNTER,
        "Fatal PCI Express errors of a host device in the VM or behind the same root port, since the kernel found it.",
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

POD = (
    Family(
        "virtshim_device_resets_total",
        Kind.COUNTER,
        "Resets of a host device of the pod, since virtshim was started: done, failed, or impossible (no reset method).",
        _resets,
        ("device", "result"),
    ),
    Family(
        "virtshim_device_broken",
        Kind.GAUGE,
        "1 for a host device of the pod whose last reset failed: no VM gets it.",
        _broken,
        ("device",),
    ),
)
