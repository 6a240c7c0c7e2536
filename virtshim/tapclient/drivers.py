"""Drivers of PCI functions and USB devices by way of tapmanager: implements `virtshim.ports.devices.DeviceDrivers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from virtshim.domain.devices.card_function import CardFunction
from virtshim.domain.devices.granted import PciAddress, UsbDevice
from virtshim.domain.errors import InternalError
from virtshim.tapclient.networks import PodNetworkClient


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

    def function(self, address: PciAddress, timeout: float) -> CardFunction:
        """See the port."""
        answer = self._client.ask("function", {"address": str(address)}, timeout, f"asking about {address}")
        driver, card, number = answer.get("driver"), answer.get("card", ""), answer.get("number", 0)
        if not (isinstance(driver, str) and isinstance(card, str) and isinstance(number, int)):
            raise InternalError("tapmanager's answer has no text 'driver', or wrong 'card' or 'number'")
        return CardFunction(driver, card, number, _settings(answer.get("settings", {})))

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

    def probe_usb(self, device: UsbDevice, timeout: float) -> Sequence[str]:
        """See the port."""
        doing = f"giving USB device {device.bus:03}/{device.device:03} back to its drivers"
        answer = self._client.ask("usb", {"bus": device.bus, "device": device.device}, timeout, doing)
        found = answer.get("interfaces")
        if not isinstance(found, list):
            raise InternalError("tapmanager's answer has no list 'interfaces'")
        return [str(interface) for interface in found]


def _settings(told: object) -> Mapping[str, str | int | bool]:
    """Whatever there is, also what a newer tapmanager knows: it is for people."""
    if not isinstance(told, dict):
        raise InternalError("tapmanager's answer has wrong 'settings'")
    return {str(name): value for name, value in told.items() if isinstance(value, str | int)}
