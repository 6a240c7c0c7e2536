"""VMs use USB devices and a vDPA network card. chapter_usb_vdpa.py has the actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import outer
import pytest
from chapter_usb_vdpa import MAC, STICK, VARIABLE

pytestmark = [pytest.mark.devices, pytest.mark.timeout(2800)]

GIB = 1 << 30
# Vendor and product of QEMU's USB sticks.
STICKS = "46f4:0001"


@pytest.fixture
def step(request: pytest.FixtureRequest) -> Callable[[str], dict[str, Any]]:
    why = outer.no_usb_or_vdpa()
    if why and not outer.missing():
        pytest.skip(f"NOT TO BE HAD HERE: {why}")
    return request.getfixturevalue("told")  # type: ignore[no-any-return]


def lines(console: list[str], kind: str) -> list[str]:
    """The guest's output about its devices of that kind."""
    return [line.strip() for line in console if line.startswith(f"{kind} ")]


def test_the_node_has_the_stick_and_the_card_first(step):
    assert step("usb and vdpa: hardware")["usb_driver"] == "usb-storage"
    assert step("usb and vdpa: hardware")["vdpa"] == "/dev/vhost-vdpa-0"


def test_the_guest_reads_the_descriptors_of_the_stick_that_was_granted(step):
    (found,) = lines(step("usb and vdpa: granted")["console"], "usb")
    assert found.endswith(f'port=1 speed=4 {STICKS} serial="{STICK}"')


def test_the_guest_finds_the_vdpa_card_at_the_predicted_address_with_its_mac(step):
    (found,) = lines(step("usb and vdpa: granted")["console"], "virtio-net")
    assert found.startswith(f"virtio-net 01:00.0 mac={MAC} ")


def test_frames_reach_the_vdpa_card_from_the_guest_and_back(step):
    granted = step("usb and vdpa: granted")
    (found,) = lines(granted["console"], "virtio-net")
    assert found.endswith('sent=60 heard="hello, card"')
    (frame,) = map(bytes.fromhex, granted["sent"])
    assert frame[6:12].hex(":") == MAC
    assert frame[14:].startswith(b"hello, card\0")


def test_an_unprivileged_qemu_has_the_usb_device_node_but_no_vdpa_node(step):
    granted = step("usb and vdpa: granted")
    assert granted["uid"] != 0
    assert granted["usb_owner"] == f"{granted['uid']} 600"
    assert granted["vdpa_owner"] == "0 600", "libvirt opens it, and hands the descriptor on"


def test_a_vm_with_a_vdpa_device_may_lock_its_memory_plus_one_gib(step):
    locked = step("usb and vdpa: granted")["memlock"]
    assert locked == "unlimited" or int(locked) > GIB


def test_the_nodes_driver_releases_the_stick_while_a_vm_has_it(step):
    assert step("usb and vdpa: granted")["usb_driver"] == "usbfs"


def test_after_the_container_ends_the_node_has_stick_and_card_as_before(step):
    removed = step("usb and vdpa: removed")
    facts = ("usb", "usb_driver", "usb_owner", "vdpa", "vdpa_owner")
    assert [removed[fact] for fact in facts] == [step("usb and vdpa: hardware")[fact] for fact in facts]


@pytest.mark.full
def test_freed_devices_are_given_to_the_next_container(step):
    console = step("usb and vdpa: given again")["console"]
    assert f'serial="{STICK}"' in lines(console, "usb")[0]
    assert 'heard="hello, card"' in lines(console, "virtio-net")[0]


@pytest.mark.full
def test_a_killed_qemu_returns_the_stick_to_the_nodes_driver(step):
    killed = step("usb and vdpa: killed")
    assert (killed["usb_driver"], killed["usb_owner"]) == ("usb-storage", "0 600")


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("usb: forged", "INVALID_ARGUMENT", VARIABLE),
        ("usb: a hub", "FAILED_PRECONDITION", "is a USB hub"),
        ("usb: not there", "INVALID_ARGUMENT", "/dev/bus/usb/001/127: it does not exist"),
        ("usb: used by the node", "FAILED_PRECONDITION", "the node's swap space is on it"),
        ("usb: claimed twice", "FAILED_PRECONDITION", "of pod default/one"),
        ("vdpa: claimed twice", "FAILED_PRECONDITION", "of pod default/one"),
    ],
)
def test_forbidden_devices_are_refused_before_a_container_is_created(step, what, code, words):
    refused = step(what)
    assert (refused["of"], refused["code"], refused["left"]) == ("create", code, 0)
    assert words in refused["message"]


@pytest.mark.full
def test_devices_unplugged_after_creation_are_named_at_the_start(step):
    gone = step("usb and vdpa: gone")
    assert (gone["of"], gone["code"]) == ("start", "FAILED_PRECONDITION")
    bus, device = gone["usb"].split("/")[-2:]
    assert f"USB device {bus}/{device} does not exist: it was unplugged" in gone["message"]
    assert f"{gone['vdpa']} does not exist" in gone["message"]


@pytest.mark.full
def test_a_replugged_stick_counts_as_another_device(step):
    assert step("usb: back")["usb"] != step("usb and vdpa: gone")["usb"]
