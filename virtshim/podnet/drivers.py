"""Drivers of PCI functions by way of tapmanager: implements `virtshim.ports.devices.DeviceDrivers`."""

from __future__ import annotations

from virtshim.domain.devices import PciAddress
from virtshim.domain.errors import InternalError
from virtshim.podnet.client import PodNetworkClient


class DeviceDriverClient:
    def __init__(self, client: PodNetworkClient) -> None:
        self._client = client

    def driver(self, address: PciAddress, timeout: float) -> str:
        """See the port."""
        answer = self._client.ask("driver", {"address": str(address)}, timeout, f"asking for the driver of {address}")
        found = answer.get("driver")
        if not isinstance(found, str):
            raise InternalError("tapmanager's answer has no text 'driver'")
        return found

    def bind(self, address: PciAddress, driver: str, timeout: float) -> None:
        """See the port."""
        args = {"address": str(address), "driver": driver}
        self._client.ask("bind", args, timeout, f"giving device {address} to {driver or 'no driver'}")

    def reset(self, address: PciAddress, timeout: float) -> bool:
        """See the port."""
        return (
            self._client.ask("reset", {"address": str(address)}, timeout, f"resetting device {address}").get("reset")
            is True
        )
