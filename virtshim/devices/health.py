"""Health of host devices in VMs: logs errors that the kernel counts, and shows functions in `crictl inspect` and
`inspectp`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from virtshim.devices.ports import DeviceDrivers, DeviceErrorCounts
from virtshim.devices.resets import DeviceResets
from virtshim.devices.values import DeviceErrors, PciAddress, PciFunction
from virtshim.model.container import Container
from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId
from virtshim.model.sandbox import Sandbox
from virtshim.model.troubles import Trouble, TroubleKind
from virtshim.store.ports import Records

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A function that a container's VM has or had. `resets`: numbers by result, since virtshim started. `errors`: None
    if the kernel counts none. `broken`: no VM gets the function."""

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

    def statuses(self, container: Container) -> Mapping[PciAddress, DeviceStatus]:
        """The status of the container's functions."""
        broken = self._resetting.broken() if container.granted.passthrough else {}
        return {
            address: DeviceStatus(self._resetting.counts(address), self._counts.errors(address), address in broken)
            for address in _functions(container)
        }

    def look(self) -> None:
        """Logs the errors since the last call. Called by one thread."""
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
        """Fatal errors of its devices since the container started. virtshim's restart resets the counts, so a recorded
        trouble stays."""
        first = self._first.get(container.id, {})
        text = "; ".join(
            f"device {address} has had {_words(new.fatal)} since the container was started"
            for address, errors in (self._counted(container) if first else {}).items()
            if (new := _since(first.get(address, errors), errors)).fatal
        )
        if text:
            return (Trouble(TroubleKind.DEVICE_ERRORS, text),)
        return tuple(one for one in container.status.troubles if one.kind is TroubleKind.DEVICE_ERRORS)

    def _counted(self, container: Container) -> Mapping[PciAddress, DeviceErrors]:
        """Error counts of the container's functions. Functions whose errors the kernel does not count are left out."""
        found = ((address, self._counts.errors(address)) for address in _functions(container))
        return {address: errors for address, errors in found if errors is not None}


def with_devices(message: str, wrong: Iterable[str]) -> str:
    """A container's message with the faults of its devices appended. Pure."""
    return "; ".join(filter(None, (message, *wrong)))


def _functions(container: Container) -> Iterator[PciAddress]:
    return (device.address for device in container.granted.passthrough if isinstance(device, PciFunction))


def _since(before: DeviceErrors, now: DeviceErrors) -> DeviceErrors:
    """The new errors: the kernel counts from 0 when it finds a device again."""
    return DeviceErrors(max(0, now.fatal - before.fatal), max(0, now.nonfatal - before.nonfatal))


def _words(fatal: int) -> str:
    return f"{fatal} fatal PCI Express error{'s' if fatal > 1 else ''}"


# Seconds for each function; whoever inspects a pod waits for it.
_LIMIT: Final = 1.0


@dataclass(frozen=True, slots=True)
class FunctionInspection:
    """Shows functions as they are now: the card's current settings, not what was once set."""

    drivers: DeviceDrivers

    def of_sandbox(self, sandbox: Sandbox) -> Sequence[Mapping[str, object]]:
        """The guest's NICs, with the function for those that are functions of a network card."""
        interfaces = sandbox.network.interfaces if sandbox.network else ()
        facts = dict(self._facts_of(PciAddress.parse(i.function) for i in interfaces if i.function))
        return [
            {
                "name": i.name,
                "mac": i.mac,
                "mtu": i.mtu,
                "addresses": list(i.addresses),
                **({"function": facts[i.function]} if i.function else {}),
            }
            for i in interfaces
        ]

    def of_container(self, container: Container) -> Sequence[Mapping[str, object]]:
        """The devices of the container."""
        held = [device for device in container.granted.passthrough if device.claim in container.claims]
        facts = dict(self._facts_of(device.address for device in held if isinstance(device, PciFunction)))
        return [
            {
                "claim": device.claim,
                "resource": device.resource,
                **(facts[str(device.address)] if isinstance(device, PciFunction) else {}),
            }
            for device in held
        ]

    def _facts_of(self, addresses: Iterator[PciAddress]) -> Iterator[tuple[str, Mapping[str, object]]]:
        """Facts by address. If tapmanager cannot be reached once, it is not asked again."""
        trouble = ""
        for address in addresses:
            facts: dict[str, object] = {"pci": str(address)}
            if not trouble:
                try:
                    found = self.drivers.function(address, _LIMIT)
                except ShimError as exc:
                    trouble = str(exc)
                else:
                    facts["driver"] = found.driver
                    if found.card:
                        settings = {_camel(name): value for name, value in found.settings.items()}
                        facts |= {"card": found.card, "number": found.number, **settings}
            yield str(address), facts | ({"trouble": trouble} if trouble else {})


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda match: match.group(1).upper(), name)
