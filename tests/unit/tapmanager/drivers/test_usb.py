"""USB devices get their drivers back. The bus and the kernel are fakes."""

import errno
import os
from pathlib import Path

import pytest
from fakes.usbbus import FakeUsbBus

from tapmanager.drivers import UsbDrivers
from tapmanager.errors import TapmanagerError


@pytest.fixture
def bus(tmp_path: Path) -> FakeUsbBus:
    bus = FakeUsbBus(tmp_path)
    bus.add("usb1", 1, 1, i0="hub")
    bus.add("1-4", 1, 7, i0="", i1="usbhid", i2="")
    bus.add("1-4.1", 1, 9, i0="")
    bus.homes |= {"1-4:1.0": "usb-storage", "1-4.1:1.0": "usbhid"}
    return bus


def test_each_driverless_interface_gets_its_matching_driver(bus: FakeUsbBus) -> None:
    drivers = UsbDrivers(str(bus.root), bus.write)
    assert drivers.probe(1, 7) == ["1-4:1.0"]
    assert [bus.driver(f"1-4:1.{number}") for number in (0, 1, 2)] == ["usb-storage", "usbhid", ""]
    assert drivers.probe(1, 7) == []


def test_a_device_behind_a_hub_is_another_device(bus: FakeUsbBus) -> None:
    UsbDrivers(str(bus.root), bus.write).probe(1, 7)
    assert bus.written == ["1-4:1.0", "1-4:1.2"]
    assert bus.driver("1-4.1:1.0") == ""


def test_an_unplugged_device_is_not_found(bus: FakeUsbBus) -> None:
    with pytest.raises(TapmanagerError, match="there is no USB device 001/008") as caught:
        UsbDrivers(str(bus.root), bus.write).probe(1, 8)
    assert caught.value.kind == "not-found"


def test_a_refusal_of_the_kernel_is_reported_with_the_interface(bus: FakeUsbBus) -> None:
    def refuse(path: str, text: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with pytest.raises(TapmanagerError, match=r"writing 1-4:1\.0 to .*drivers_probe failed: Invalid argument"):
        UsbDrivers(str(bus.root), refuse).probe(1, 7)


def test_without_usb_there_is_no_device(tmp_path: Path) -> None:
    with pytest.raises(TapmanagerError, match="there is no USB device"):
        UsbDrivers(str(tmp_path)).probe(1, 7)


def test_an_unreadable_device_is_not_taken_for_unplugged(bus: FakeUsbBus, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("builtins.open", no_descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        UsbDrivers(str(bus.root), bus.write).probe(1, 7)
