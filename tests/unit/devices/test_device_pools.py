"""A resource offers the right functions, and prefers functions that are best given away together."""

from __future__ import annotations

import dataclasses

import pytest

from virtshim.devices.pools import HostFunction, Offer, Pool, offers, overlap, preferred
from virtshim.devices.values import PciAddress

PF = PciAddress.parse("0000:3b:00.0")


def vf(text: str, group: int | None = 40, **facts: object) -> HostFunction:
    usual = HostFunction(
        PciAddress.parse(text),
        "8086",
        "37c9",
        driver="vfio-pci",
        is_vfio=True,
        group=group,
        numa=0,
        physfn=PF,
        has_vfio_node=True,
    )
    return dataclasses.replace(usual, **facts)


def ids(pool: Pool, *facts: HostFunction) -> list[str]:
    return [offer.id for offer in offers(pool, facts)]


@pytest.mark.parametrize(
    ("criteria", "wanted"),
    [
        ({"vendor": "8086"}, True),
        ({"vendor": "10de"}, False),
        ({"vendor": "8086", "devices": frozenset({"37c9", "18a1"})}, True),
        ({"vendor": "8086", "devices": frozenset({"18a1"})}, False),
        ({"pfs": frozenset({PF})}, True),
        ({"pfs": frozenset({PciAddress.parse("0000:3c:00.0")})}, False),
        ({"addresses": frozenset({PciAddress.parse("0000:3b:01.2")})}, True),
        ({"addresses": frozenset({PF})}, False),
        ({"vendor": "8086", "functions": "virtual"}, True),
        ({"vendor": "8086", "functions": "physical"}, False),
        ({"vendor": "8086", "pfs": frozenset({PciAddress.parse("0000:3c:00.0")})}, False),
    ],
)
def test_a_function_belongs_to_a_pool_if_it_meets_all_criteria(criteria, wanted) -> None:
    assert (ids(Pool("a.b/c", **criteria), vf("0000:3b:01.2")) == ["0000:3b:01.2"]) is wanted


def test_offers_are_sorted_by_address() -> None:
    pool = Pool("a.b/c", vendor="8086")
    assert ids(pool, vf("0001:01:00.0", 9), vf("0000:3b:01.2", 8), vf("0000:3b:01.1", 7)) == [
        "0000:3b:01.1",
        "0000:3b:01.2",
        "0001:01:00.0",
    ]


def test_functions_of_one_group_are_one_device() -> None:
    (offer,) = offers(Pool("a.b/c", vendor="8086"), [vf("0000:3b:01.2", 7), vf("0000:3b:01.1", 7)])
    assert [str(function) for function in offer.functions] == ["0000:3b:01.1", "0000:3b:01.2"]
    assert offer.nodes == ("/dev/vfio/vfio", "/dev/vfio/7")


def test_a_group_with_a_function_that_the_node_uses_is_not_available() -> None:
    nic = vf("0000:3b:02.0", 7, vendor="1af4", driver="virtio-pci", is_vfio=False, is_busy=True)
    elsewhere = dataclasses.replace(nic, address=PciAddress.parse("0000:3b:03.0"), group=8)
    (offer,) = offers(Pool("a.b/c", vendor="8086"), [vf("0000:3b:01.1", 7), nic, elsewhere])
    assert offer.fault == (
        "IOMMU group 7 also has 0000:3b:02.0, which is bound to virtio-pci: bind it to vfio-pci or unbind it"
    )


def test_an_idle_function_in_the_group_does_no_harm() -> None:
    idle = vf("0000:3b:02.0", 7, vendor="1af4", driver="", is_vfio=False)
    (offer,) = offers(Pool("a.b/c", vendor="8086"), [vf("0000:3b:01.1", 7), idle])
    assert offer.fault == ""


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({}, ""),
        ({"driver": "mlx5_vfio_pci"}, ""),
        ({"driver": "iavf", "is_vfio": False}, "0000:3b:01.1 is bound to iavf, not to vfio-pci"),
        ({"driver": "", "is_vfio": False}, "0000:3b:01.1 is bound to no driver, not to vfio-pci"),
        ({"group": None}, "0000:3b:01.1 has no IOMMU group: "),
        ({"has_vfio_node": False}, "/dev/vfio/40 does not exist: "),
    ],
)
def test_an_unavailable_function_is_offered_with_the_reason(facts, fault) -> None:
    (offer,) = offers(Pool("a.b/c", vendor="8086"), [vf("0000:3b:01.1", **facts)])
    assert offer.fault.startswith(fault)
    assert bool(offer.fault) == bool(fault)


def test_a_pool_may_name_its_drivers() -> None:
    (offer,) = offers(Pool("a.b/c", vendor="8086", drivers=frozenset({"c6xxvf"})), [vf("0000:3b:01.1")])
    assert offer.fault == "0000:3b:01.1 is bound to vfio-pci, not to c6xxvf"


def test_the_variable_is_named_as_by_the_sriov_plugin() -> None:
    assert Pool("intel.com/my-net.fast").variable == "PCIDEVICE_INTEL_COM_MY-NET_FAST"


def test_a_group_that_two_resources_offer_is_reported() -> None:
    one = offers(Pool("a.b/one", vendor="8086"), [vf("0000:3b:01.1", 7), vf("0000:3b:01.2", 8)])
    two = offers(Pool("a.b/two", addresses=frozenset({PF})), [vf("0000:3b:00.0", 8, physfn=None)])
    assert overlap({"a.b/one": one, "a.b/two": two}) == {"group 8": "a.b/one and a.b/two"}


def offer(text: str, numa: int | None) -> Offer:
    return Offer((PciAddress.parse(text),), 1, numa)


TWO_NODES = [
    offer("0000:01:00.0", 0),
    offer("0000:01:00.1", 0),
    offer("0000:01:00.2", 0),
    offer("0000:81:00.0", 1),
    offer("0000:81:00.1", 1),
]
ALL = [device.id for device in TWO_NODES]


@pytest.mark.parametrize(
    ("must", "size", "chosen"),
    [
        ((), 1, ["0000:81:00.0"]),  # of the smaller node: the bigger stays whole
        ((), 2, ["0000:81:00.0", "0000:81:00.1"]),
        ((), 3, ["0000:01:00.0", "0000:01:00.1", "0000:01:00.2"]),
        (("0000:01:00.2",), 2, ["0000:01:00.2", "0000:01:00.0"]),
        (("0000:81:00.1",), 3, ["0000:81:00.1", "0000:81:00.0", "0000:01:00.0"]),
        ((), 9, ["0000:01:00.0", "0000:01:00.1", "0000:01:00.2", "0000:81:00.0", "0000:81:00.1"]),
        ((), 0, []),
    ],
)
def test_devices_of_one_numa_node_are_preferred(must, size, chosen) -> None:
    assert sorted(preferred(TWO_NODES, ALL, must, size)) == sorted(chosen)


def test_only_available_devices_are_preferred() -> None:
    assert preferred(TWO_NODES, ["0000:01:00.1", "not.there"], (), 2) == ("0000:01:00.1",)


def test_all_devices_come_from_one_of_two_equal_numa_nodes() -> None:
    mixed = [offer(f"0000:01:00.{n}", n % 2) for n in range(6)]
    assert preferred(mixed, [one.id for one in mixed], (), 3) == ("0000:01:00.0", "0000:01:00.2", "0000:01:00.4")


class Compared(str):
    """An id that counts how often one is compared with another."""

    __slots__ = ()
    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_the_preference_does_not_compare_all_pairs_of_devices() -> None:
    """A kubelet that asks about a hundred thousand holds up nobody."""
    many = [Offer((PciAddress(0, n >> 8, n >> 3 & 31, n & 7),), n, n % 2) for n in range(3000)]
    available = [Compared(device.id) for device in many] + [Compared(f"gone-{n}") for n in range(10_000)]
    Compared.times = 0
    chosen = preferred(many, available, (), 2)
    assert Compared.times < 10 * len(available)
    assert chosen == (many[0].id, many[2].id)
