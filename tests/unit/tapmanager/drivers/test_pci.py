"""tapmanager changes drivers of PCI functions. The bus and the kernel are fakes."""

from pathlib import Path

import pytest
from fakes.pcibus import FakePciBus

from tapmanager.drivers import PciDrivers
from tapmanager.errors import TapmanagerError

ONE, TWO = "0000:3b:00.1", "0000:3b:00.2"


@pytest.fixture
def bus(tmp_path: Path) -> FakePciBus:
    bus = FakePciBus(tmp_path)
    bus.add_driver("vfio-pci")
    bus.add(ONE, "iavf")
    bus.add(TWO)
    return bus


@pytest.fixture
def drivers(bus: FakePciBus) -> PciDrivers:
    return PciDrivers(str(bus.root), bus.write, bus.is_open)


def test_a_function_is_bound_to_vfio_and_back(bus: FakePciBus, drivers: PciDrivers) -> None:
    assert drivers.driver(ONE) == "iavf"
    drivers.bind(ONE, "vfio-pci")
    assert drivers.driver(ONE) == "vfio-pci"
    drivers.bind(ONE, "iavf")
    assert (drivers.driver(ONE), bus.override(ONE)) == ("iavf", "(null)")


def test_a_function_without_a_driver_is_bound_to_vfio_and_unbound_again(bus: FakePciBus, drivers: PciDrivers) -> None:
    bus.homes[TWO] = "iavf"
    drivers.bind(TWO, "vfio-pci")
    drivers.bind(TWO, "")
    assert (drivers.driver(TWO), bus.override(TWO)) == ("", "(null)")


def test_no_other_function_is_touched(bus: FakePciBus, drivers: PciDrivers) -> None:
    drivers.bind(ONE, "vfio-pci")
    assert drivers.driver(TWO) == ""
    assert not any("new_id" in path for path, _ in bus.written)


def test_a_repeated_bind_does_not_unbind_in_between(bus: FakePciBus, drivers: PciDrivers) -> None:
    drivers.bind(ONE, "vfio-pci")
    bus.written.clear()
    drivers.bind(ONE, "vfio-pci")
    assert [path for path, _ in bus.written if path.endswith(("bind", "probe"))] == []


def test_an_interrupted_bind_is_completed_by_the_next(bus: FakePciBus, drivers: PciDrivers) -> None:
    bus.write(str(bus.bus / f"devices/{ONE}/driver/unbind"), ONE)
    drivers.bind(ONE, "vfio-pci")
    assert drivers.driver(ONE) == "vfio-pci"


def test_a_function_that_another_driver_grabs_first_is_bound_anyway(bus: FakePciBus, drivers: PciDrivers) -> None:
    bus.add_driver("special")
    drivers.bind(ONE, "special")
    assert drivers.driver(ONE) == "special"


def test_the_error_names_a_driver_that_does_not_take_the_function(bus: FakePciBus, drivers: PciDrivers) -> None:
    bus.broken.add("vfio-pci")
    with pytest.raises(TapmanagerError, match="has no driver instead of vfio-pci") as error:
        drivers.bind(ONE, "vfio-pci")
    assert error.value.kind == "internal"


def test_without_the_module_nothing_is_changed(bus: FakePciBus, drivers: PciDrivers) -> None:
    (bus.bus / "drivers/vfio-pci").rmdir()
    with pytest.raises(TapmanagerError, match="modprobe vfio-pci") as error:
        drivers.bind(ONE, "vfio-pci")
    assert error.value.kind == "failed-precondition"
    assert drivers.driver(ONE) == "iavf"


@pytest.mark.parametrize("code", ["0x060000", "0x060400"])
def test_a_bridge_keeps_its_driver(bus: FakePciBus, drivers: PciDrivers, code: str) -> None:
    bus.add("0000:00:1c.0", "pcieport", class_code=code)
    with pytest.raises(TapmanagerError, match="bridge"):
        drivers.bind("0000:00:1c.0", "vfio-pci")
    assert drivers.driver("0000:00:1c.0") == "pcieport"


@pytest.mark.parametrize("address", ["", "0000:3b:00.1/..", "../../x", "3b:00.1", "0000:3B:00.1", "0000:3b:00.1\n"])
@pytest.mark.parametrize("ask", ["driver", "bind", "reset"])
def test_a_malformed_address_reaches_no_file(bus: FakePciBus, drivers: PciDrivers, ask: str, address: str) -> None:
    with pytest.raises(TapmanagerError, match="not a PCI address"):
        getattr(drivers, ask)(address, *(["vfio-pci"] if ask == "bind" else []))
    assert bus.written == []


@pytest.mark.parametrize("driver", ["../x", "a/b", "x" * 65, "vfio-pci\n"])
def test_a_malformed_driver_name_reaches_no_file(bus: FakePciBus, drivers: PciDrivers, driver: str) -> None:
    with pytest.raises(TapmanagerError, match="not the name of a driver"):
        drivers.bind(ONE, driver)
    assert bus.written == []


def test_a_function_that_is_gone_is_not_found(drivers: PciDrivers) -> None:
    with pytest.raises(TapmanagerError) as error:
        drivers.bind("0000:ff:00.0", "vfio-pci")
    assert error.value.kind == "not-found"


def test_a_reset_is_written_if_the_function_has_one(bus: FakePciBus, drivers: PciDrivers) -> None:
    bus.add("0000:3b:00.3", reset=False)
    assert (drivers.reset(ONE), drivers.reset("0000:3b:00.3")) == (True, False)
    assert bus.written == [(f"devices/{ONE}/reset", "1")]


def test_the_real_writer_raises_the_kernels_error(bus: FakePciBus, tmp_path: Path) -> None:
    with pytest.raises(TapmanagerError, match="drivers_probe cannot be written: No such file"):
        PciDrivers(str(tmp_path)).bind(TWO, "vfio-pci")
    assert bus.override(TWO) == "vfio-pci"


@pytest.mark.parametrize("driver", ["iavf", ""])
def test_a_function_that_a_vm_has_stays_at_vfio(bus: FakePciBus, drivers: PciDrivers, driver: str) -> None:
    bus.in_group(ONE, 17)
    drivers.bind(ONE, "vfio-pci")
    bus.opened.add(17)
    bus.written.clear()
    with pytest.raises(TapmanagerError, match="IOMMU group 17 open") as caught:
        drivers.bind(ONE, driver)
    assert (caught.value.kind, bus.written) == ("failed-precondition", [])
    bus.opened.clear()
    drivers.bind(ONE, driver)
    assert drivers.driver(ONE) == driver


def test_no_host_driver_is_bound_in_a_group_that_a_vm_has(bus: FakePciBus, drivers: PciDrivers) -> None:
    bus.in_group(TWO, 17)
    bus.opened.add(17)
    with pytest.raises(TapmanagerError, match="in use"):
        drivers.bind(TWO, "iavf")
    assert drivers.driver(TWO) == ""


def test_a_function_that_a_vm_has_is_not_reset(bus: FakePciBus, drivers: PciDrivers) -> None:
    bus.in_group(ONE, 17)
    bus.opened.add(17)
    with pytest.raises(TapmanagerError, match="in use"):
        drivers.reset(ONE)
    assert bus.written == []
