"""A device of a kept root disk gets a place once, and nothing takes that place away."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtshim.model.hardware import BYTES, MOST, Places, places_from_bytes

NAMES = st.lists(st.text(min_size=1, max_size=8), max_size=12, unique=True)


def test_devices_are_numbered_in_order_at_first():
    assert Places().numbered("v", ["root", "seed", "data"], 64)[1] == (0, 1, 2)


def test_a_device_added_later_moves_no_other():
    places, _ = Places().numbered("v", ["root", "seed", "data"], 64)
    places, numbers = places.numbered("v", ["root", "seed", "logs", "data"], 64)
    assert numbers == (0, 1, 3, 2)
    assert places.numbered("v", ["data", "root"], 64)[1] == (2, 0)


def test_the_place_of_a_removed_device_is_reused_only_if_no_other_is_free():
    places, _ = Places().numbered("v", ["root", "data"], 3)
    places, numbers = places.numbered("v", ["root", "new"], 3)
    assert numbers == (0, 2)
    assert places.numbered("v", ["root", "data", "new"], 3)[1] == (0, 1, 2)
    assert places.numbered("v", ["root", "newer", "new"], 3)[1] == (0, 1, 2)


def test_a_number_beyond_the_limit_is_assigned_again():
    places, _ = Places().numbered("a", ["root", "seed", "gone"], 6)
    places, _ = places.numbered("a", ["root", "seed", *"bcd"], 6)
    assert places.numbered("a", ["root", "seed", *"bcd"], 5)[1] == (0, 1, 3, 4, 2)


def test_each_kind_of_device_is_numbered_separately():
    places, _ = Places().numbered("v", ["root"], 64)
    assert places.numbered("n", ["eth0"], 10)[1] == (0,)


@given(machine=st.sampled_from(["", "pc-q35-7.2"]), rows=st.lists(NAMES, max_size=4))
def test_written_places_can_be_read_back(machine: str, rows: list[list[str]]):
    places = Places(machine)
    for names in rows:
        places, numbers = places.numbered("v", names, 64)
        assert len(set(numbers)) == len(names)
    text = places.to_bytes()
    assert len(text) <= BYTES
    assert places_from_bytes(text.ljust(512, b"\0")) == places


def test_as_many_as_a_vm_can_have_fit_into_a_volumes_first_sector():
    places, _ = Places("pc-q35-rhel9.6.0").numbered("v", [f"disk {number}" for number in range(MOST - 10)], 64)
    places, _ = places.numbered("n", [f"net{number}" for number in range(10)], 10)
    assert places_from_bytes(places.to_bytes()) == places
    assert BYTES <= 512 - 96


@pytest.mark.parametrize(
    "text", [b"", b"vmplaces", b"vmplaces\x05pc", b"vmplaces\x00\x09x", b"vmplaces\x01\n\x00", b"!" * 512]
)
def test_foreign_or_truncated_data_gives_no_places(text: bytes):
    assert places_from_bytes(text) == Places()


@given(st.binary(max_size=64))
def test_any_bytes_can_be_read(rest: bytes):
    places_from_bytes(b"vmplaces" + rest)
