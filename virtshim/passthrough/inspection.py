"""What `crictl inspect` and `inspectp` show of PCI functions that VMs have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.domain.container import Container
from virtshim.domain.devices.granted import PciAddress, PciFunction
from virtshim.domain.errors import ShimError
from virtshim.domain.sandbox import Sandbox
from virtshim.ports.devices import DeviceDrivers

# Seconds for each; whoever inspects a pod waits for it.
_LIMIT: Final = 1.0


@dataclass(frozen=True, slots=True)
class FunctionInspection:
    """As they are now: what the card says, not what was once set."""

    drivers: DeviceDrivers

    def of_sandbox(self, sandbox: Sandbox) -> Sequence[Mapping[str, object]]:
        """The guest's NICs; what is a function of a network card says so."""
        interfaces = sandbox.network.interfaces if sandbox.network else ()
        told = dict(self._told(PciAddress.parse(i.function) for i in interfaces if i.function))
        return [
            {
                "name": i.name,
                "mac": i.mac,
                "mtu": i.mtu,
                "addresses": list(i.addresses),
                **({"function": told[i.function]} if i.function else {}),
            }
            for i in interfaces
        ]

    def of_container(self, container: Container) -> Sequence[Mapping[str, object]]:
        """The devices that are its own."""
        held = [device for device in container.granted.passthrough if device.claim in container.claims]
        told = dict(self._told(device.address for device in held if isinstance(device, PciFunction)))
        return [
            {
                "claim": device.claim,
                "resource": device.resource,
                **(told[str(device.address)] if isinstance(device, PciFunction) else {}),
            }
            for device in held
        ]

    def _told(self, addresses: Iterator[PciAddress]) -> Iterator[tuple[str, Mapping[str, object]]]:
        """By address. Once tapmanager could not be reached, it is not asked again."""
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
