"""Drivers of PCI functions and USB devices, changed by tapmanager. Implements
`virtshim.devices.ports.DeviceDrivers`."""

from __future__ import annotations

from collections.abc import Sequence

from tapmanager.fields import Json, as_object, number, require, text, texts
from virtshim.devices.values import CardFunction, PciAddress, UsbDevice
from virtshim.pods.tapmanager_connection import TapmanagerConnection

_MOST_FUNCTIONS = 1 << 16  # the most that a card's TotalVFs can say


class DeviceDriverClient:
    def __init__(self, tapmanager: TapmanagerConnection) -> None:
        self._tapmanager = tapmanager

    def driver(self, address: PciAddress, timeout: float) -> str:
        doing = f"asking for the driver of {address}"
        return self._tapmanager.ask("driver", {"address": str(address)}, timeout, doing, _driver)

    def function(self, address: PciAddress, timeout: float) -> CardFunction:
        doing = f"asking about {address}"
        return self._tapmanager.ask("function", {"address": str(address)}, timeout, doing, _function)

    def bind(self, address: PciAddress, driver: str, timeout: float) -> None:
        args = {"address": str(address), "driver": driver}
        self._tapmanager.tell("bind", args, timeout, f"giving device {address} to {driver or 'no driver'}")

    def reset(self, address: PciAddress, timeout: float) -> bool:
        doing = f"resetting device {address}"
        return self._tapmanager.ask("reset", {"address": str(address)}, timeout, doing, _was_reset)

    def probe_usb(self, device: UsbDevice, timeout: float) -> Sequence[str]:
        doing = f"giving USB device {device.bus:03}/{device.device:03} back to its drivers"
        return self._tapmanager.ask("usb", {"bus": device.bus, "device": device.device}, timeout, doing, _interfaces)


def _driver(answer: Json) -> str:
    return text(answer, "driver", "answer")


def _function(answer: Json) -> CardFunction:
    """Accepts whatever settings there are, including those of a newer tapmanager, because only people read them."""
    settings = as_object(answer.get("settings", {}), "answer.settings")
    return CardFunction(
        _driver(answer),
        text(answer, "card", "answer", ""),
        number(answer, "number", "answer", 0, _MOST_FUNCTIONS) if "number" in answer else 0,
        {name: value for name, value in settings.items() if isinstance(value, str | int)},
    )


def _was_reset(answer: Json) -> bool:
    return answer.get("reset") is True


def _interfaces(answer: Json) -> Sequence[str]:
    require(answer, ("interfaces",), "answer")
    return texts(answer, "interfaces", "answer")
