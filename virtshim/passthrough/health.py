"""Devices of the host in VMs: errors that the kernel counts are told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from virtshim.domain.container import Container
from virtshim.domain.devices.granted import DeviceErrors, PciAddress, PciFunction
from virtshim.domain.ids import ContainerId
from virtshim.domain.troubles.trouble import Trouble, TroubleKind
from virtshim.passthrough.resets import DeviceResets
from virtshim.ports.devices import DeviceErrorCounts
from virtshim.ports.records import Records

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A function that a container's VM has or had, in numbers: `resets` by result, since virtshim started; `errors` None if the
    kernel counts none; `broken`: no VM gets it."""

    resets: Mapping[str, int] = field(default_factory=dict)
    errors: DeviceErrors | None = None
    broken: bool = False


class DeviceHealth:
    def __init__(self, records: Records, counts: DeviceErrorCounts, resetting: DeviceResets) -> None:
        self._records = records
        self._counts = counts
        self._resetting = resetting
        self._seen: Mapping[PciAddress, DeviceErrors] = {}
        self._first: Mapping[ContainerId, Mapping[PciAddress, DeviceErrors]] = {}

    def of(self, container: Container) -> Mapping[PciAddress, DeviceStatus]:
        """Its functions."""
        broken = self._resetting.broken() if container.granted.passthrough else {}
        return {
            address: DeviceStatus(self._resetting.counts(address), self._counts.of(address), address in broken)
            for address in _functions(container)
        }

    def look(self) -> None:
        """One round: logs errors that were counted since the last one. Called by one thread."""
        now: dict[PciAddress, DeviceErrors] = {}
        first: dict[ContainerId, Mapping[PciAddress, DeviceErrors]] = {}
        for container in self._records.containers.all():
            if not container.is_running:
                continue
            counted = self._counted(container)
            if counted:
                first[container.id] = {**counted, **self._first.get(container.id, {})}
            now.update(counted)
            for address, errors in counted.items():
                new = _since(self._seen.get(address, errors), errors)
                if new.fatal or new.nonfatal:
                    log.warning(
                        "device.errors",
                        device=str(address),
                        container=container.id.short,
                        fatal=new.fatal,
                        nonfatal=new.nonfatal,
                    )
        self._seen, self._first = now, first

    def troubles(self, container: Container) -> tuple[Trouble, ...]:
        """Fatal errors of its devices since it was started. Counts begin anew when virtshim does, so what is recorded stays."""
        first = self._first.get(container.id, {})
        told = "; ".join(
            f"device {address} has had {_words(new.fatal)} since the container was started"
            for address, errors in (self._counted(container) if first else {}).items()
            if (new := _since(first.get(address, errors), errors)).fatal
        )
        if told:
            return (Trouble(TroubleKind.DEVICE_ERRORS, told),)
        return tuple(one for one in container.status.troubles if one.kind is TroubleKind.DEVICE_ERRORS)

    def _counted(self, container: Container) -> Mapping[PciAddress, DeviceErrors]:
        """Of its functions those for which the kernel counts."""
        found = ((address, self._counts.of(address)) for address in _functions(container))
        return {address: errors for address, errors in found if errors is not None}


def with_devices(message: str, wrong: Iterable[str]) -> str:
    """A container's message, and what is wrong with its devices. Pure."""
    return "; ".join(filter(None, (message, *wrong)))


def _functions(container: Container) -> Iterator[PciAddress]:
    return (device.address for device in container.granted.passthrough if isinstance(device, PciFunction))


def _since(before: DeviceErrors, now: DeviceErrors) -> DeviceErrors:
    """Counts begin anew when the kernel finds a device again."""
    return DeviceErrors(max(0, now.fatal - before.fatal), max(0, now.nonfatal - before.nonfatal))


def _words(fatal: int) -> str:
    return f"{fatal} fatal PCI Express error{'s' if fatal > 1 else ''}"
