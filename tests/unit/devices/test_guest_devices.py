"""Each device has a predictable place in the guest, and the guest's environment names that place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.devices.guest_view import (
    guest_addresses,
    guest_buses,
    guest_environment,
    guest_serials,
    refuse_too_many_functions,
)
from virtshim.devices.values import (
    BlockDevice,
    GrantedDevices,
    MediatedDevice,
    Passthrough,
    PciAddress,
    PciFunction,
    UsbDevice,
)
from virtshim.model.errors import InvalidRequest


def function(address: str) -> PciFunction:
    return PciFunction(PciAddress.parse(address))


ONE, TWO = function("0000:3b:00.1"), function("10000:e1:00.0")
GRANTED = GrantedDevices((ONE, UsbDevice(1, 2), MediatedDevice("6b3c3c0e-5e8a-4a52-8a5f-1c6f1b0d0f11"), TWO))


def told(name: str, value: str, granted: GrantedDevices = GRANTED) -> str | None:
    found = dict(guest_environment([(name, value.encode())], granted))
    return found[name].decode() if found else None


def test_each_pci_device_has_its_own_bus_in_order() -> None:
    assert [bus for bus, _ in guest_buses(GRANTED.passthrough)] == [1, 2, 3]
    assert {str(h): str(g) for h, g in guest_addresses(GRANTED.passthrough).items()} == {
        "0000:3b:00.1": "0000:01:00.0",
        "10000:e1:00.0": "0000:03:00.0",
    }


@pytest.mark.parametrize("name", ["PCIDEVICE_INTEL_COM_X", "PCI_RESOURCE_NVIDIA_COM_A100", "QAT0", "QAT17"])
def test_a_plugins_variable_holds_the_guests_address(name: str) -> None:
    assert told(name, "0000:3b:00.1") == "0000:01:00.0"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10000:e1:00.0,0000:3b:00.1", "0000:03:00.0,0000:01:00.0"),
        ("3B:00.1", "0000:01:00.0"),
        ("0000:3b:00.1,", "0000:01:00.0,"),
        ("mlx5_core.sf.4,0000:3b:00.1", "mlx5_core.sf.4,0000:01:00.0"),
        ("", ""),
    ],
)
def test_lists_keep_their_order_and_items_that_are_no_addresses(value: str, expected: str) -> None:
    assert told("PCIDEVICE_X", value) == expected


@pytest.mark.parametrize(
    "value", ["0000:3b:00.2", "0000:3b:00.1,0000:3b:00.2", '{"0000:3b:00.2": {}}', '{"0000:3b', "[" * 9]
)
def test_a_variable_with_an_address_that_is_not_the_guests_is_left_out(value: str) -> None:
    expected = "[" * 9 if value.startswith("[") else None  # no address, no JSON: a text
    assert told("PCIDEVICE_X_INFO", value) == expected


def test_the_info_variable_has_the_guests_addresses_too() -> None:
    info = {
        "0000:3b:00.1": {"generic": {"deviceID": "0000:3b:00.1"}, "vfio": {"mount": "/dev/vfio/vfio"}, "n": [1, None]}
    }
    found = told("PCIDEVICE_X_INFO", json.dumps(info))
    assert found is not None
    assert json.loads(found) == {
        "0000:01:00.0": {"generic": {"deviceID": "0000:01:00.0"}, "vfio": {"mount": "/dev/vfio/vfio"}, "n": [1, None]}
    }


@pytest.mark.parametrize("name", ["MY_ADDRESS", "XPCIDEVICE_A", "QATX", "PCIDEVICE", "MDEV_PCI_RESOURCE_X"])
def test_other_variables_are_left_unchanged(name: str) -> None:
    assert told(name, "0000:ff:00.0") == "0000:ff:00.0"


def test_the_guest_does_not_get_a_usb_devices_host_numbers() -> None:
    assert told("USB_RESOURCE_EXAMPLE_COM_STICK", "1:2") is None


def test_json_that_is_nested_too_deeply_is_left_out() -> None:
    assert told("PCIDEVICE_X_INFO", '{"a":' * 100_000) is None


@given(st.lists(st.tuples(st.sampled_from(["PCIDEVICE_A", "A", "QAT1"]), st.binary(max_size=30))))
def test_any_bytes_are_accepted(envs: list[tuple[str, bytes]]) -> None:
    assert set(guest_environment(envs, GRANTED)) <= {*envs} | {
        (name, value) for name, value in guest_environment(envs, GRANTED) if name != "A"
    }


def block(path: str) -> BlockDevice:
    return BlockDevice("/dev/loop0", path)


def test_a_block_device_is_found_by_its_path() -> None:
    assert guest_serials([block("/dev/xvda"), block("/data")]) == ["dev-xvda", "data"]


def test_long_and_equal_names_get_a_hash() -> None:
    first, second, third, fourth = guest_serials(
        [block("/dev/a/b"), block("/dev/a-b"), block("/dev/disks/of/the/archive"), block("/")]
    )
    assert len({first, second, third, fourth}) == 4
    assert (first[:8], second[:8]) == ("dev-a-b-", "dev-a-b-")
    assert third.startswith("dev-disks-o-")


@given(st.lists(st.text(max_size=40).map(lambda text: f"/{text}"), unique=True, max_size=8))
def test_serials_fit_the_device_and_differ(paths: list[str]) -> None:
    found = guest_serials([block(path) for path in paths])
    assert len(set(found)) == len(paths)
    assert all(0 < len(serial) <= 20 and serial.isascii() for serial in found)


@pytest.mark.parametrize(
    ("granted", "what"),
    [
        (GrantedDevices(tuple(PciFunction(PciAddress(0, n, 0, 0)) for n in range(49))), "49 PCI"),
        (GrantedDevices(tuple(UsbDevice(1, n) for n in range(16))), "16 USB"),
        (GrantedDevices(blocks=(block("/x"),) * 25), "25 block"),
    ],
)
def test_more_devices_than_a_vm_can_have_are_refused(granted: GrantedDevices, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        refuse_too_many_functions(granted)


@pytest.mark.parametrize(
    ("device", "pins"),
    [(UsbDevice(1, 2), False), (ONE, True), (MediatedDevice("6b3c3c0e-5e8a-4a52-8a5f-1c6f1b0d0f11"), True)],
)
def test_a_device_with_dma_pins_guest_memory(device: Passthrough, pins: bool) -> None:
    assert GrantedDevices((device,)).pins_memory is pins
