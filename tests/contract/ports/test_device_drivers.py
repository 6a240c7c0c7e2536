"""The fake, and tapmanager over the wire with a fake bus, fulfil the contract of DeviceDrivers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.devices import FakeDeviceDrivers
from fakes.pcibus import FakePciBus
from fakes.usbbus import FakeUsbBus

from tapmanager import server, verbs
from tapmanager.drivers import PciDrivers, UsbDrivers
from tapmanager.sriov.nic_functions import NicFunctions
from tapmanager.sriov.physical_function import PhysicalFunctions
from virtshim.devices.driver_client import DeviceDriverClient
from virtshim.devices.ports import DeviceDrivers
from virtshim.devices.values import CardFunction, PciAddress, UsbDevice
from virtshim.model.errors import InternalError, NotFound, Unavailable
from virtshim.pods.tapmanager_connection import TapmanagerConnection

ONE, BARE, NONE = (PciAddress.parse(f"0000:3b:00.{n}") for n in (1, 2, 7))


STICK = UsbDevice(2, 5)


def _fake() -> DeviceDrivers:
    fake = FakeDeviceDrivers()
    fake.drivers |= {str(ONE): "iavf", str(BARE): ""}
    fake.gone.add(str(NONE))
    fake.no_reset.add(str(BARE))
    fake.broken.add("broken")
    fake.driverless[STICK.claim] = ["2-1:1.0"]
    return fake


@pytest.fixture(params=["fake", "tapmanager"])
def drivers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DeviceDrivers]:
    if request.param == "fake":
        yield _fake()
        return
    usb = FakeUsbBus(tmp_path / "sys")
    usb.add("2-1", STICK.bus, STICK.device, i0="")
    usb.homes["2-1:1.0"] = "usb-storage"
    bus = FakePciBus(tmp_path / "sys")
    bus.add_driver("vfio-pci")
    bus.add_driver("broken")
    bus.broken.add("broken")
    bus.add(str(ONE), "iavf")
    bus.add(str(BARE), reset=False)
    changing = PciDrivers(str(bus.root), bus.write)
    links = cast("Any", None)  # none of these is a network card's
    functions = NicFunctions(changing, links, PhysicalFunctions(links, str(bus.root)), str(bus.root))
    owned = verbs.HostResources(
        cast("Any", None), cast("Any", None), changing, functions, UsbDrivers(str(usb.root), usb.write)
    )
    path = str(tmp_path / "t.sock")
    running = server.Server(
        server.listen(path, os.getegid()), lambda *asked: verbs.perform(owned, *asked), os.geteuid()
    )
    running.start()
    yield DeviceDriverClient(TapmanagerConnection(path))
    running.stop(5.0)


def test_a_functions_driver_can_be_changed_and_restored(drivers: DeviceDrivers) -> None:
    assert drivers.driver(ONE, 5.0) == "iavf"
    for wanted in ("vfio-pci", "vfio-pci", "iavf", ""):
        drivers.bind(ONE, wanted, 5.0)
        assert drivers.driver(ONE, 5.0) == wanted


def test_a_function_without_a_driver_has_none(drivers: DeviceDrivers) -> None:
    assert drivers.driver(BARE, 5.0) == ""
    drivers.bind(BARE, "", 5.0)
    assert drivers.driver(BARE, 5.0) == ""


def test_a_function_that_is_not_a_network_vf_has_its_driver_only(drivers: DeviceDrivers) -> None:
    assert drivers.function(ONE, 5.0) == CardFunction("iavf")


def test_a_missing_function_is_not_found(drivers: DeviceDrivers) -> None:
    with pytest.raises(NotFound, match="0000:3b:00"):
        drivers.driver(NONE, 5.0)
    with pytest.raises(NotFound):
        drivers.bind(NONE, "vfio-pci", 5.0)


def test_a_driver_that_does_not_bind_the_function_is_an_error(drivers: DeviceDrivers) -> None:
    with pytest.raises(InternalError, match="broken"):
        drivers.bind(ONE, "broken", 5.0)


def test_reset_returns_whether_the_function_can_be_reset(drivers: DeviceDrivers) -> None:
    assert (drivers.reset(ONE, 5.0), drivers.reset(BARE, 5.0)) == (True, False)


def test_a_usb_device_finds_its_drivers_again(drivers: DeviceDrivers) -> None:
    assert list(drivers.probe_usb(STICK, 5.0)) == ["2-1:1.0"]
    assert list(drivers.probe_usb(STICK, 5.0)) == []
    with pytest.raises(NotFound, match="USB device 002/006"):
        drivers.probe_usb(UsbDevice(2, 6), 5.0)


def test_drivers_are_unavailable_without_tapmanager(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        DeviceDriverClient(TapmanagerConnection(str(tmp_path / "none.sock"))).driver(ONE, 1.0)
