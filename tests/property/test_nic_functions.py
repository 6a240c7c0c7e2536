"""A network card's function gets into a VM and back, whatever the card forgets and whatever fails on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from fakes.examples import examples
from fakes.netcard import FRESH, VFS, FakeNetCard
from hypothesis import given, settings
from hypothesis import strategies as st

from tapmanager.drivers import PciDrivers
from tapmanager.errors import TapmanagerError
from tapmanager.pod import NicFunction
from tapmanager.sriov.nic_functions import NicFunctions
from tapmanager.sriov.physical_function import PhysicalFunctions
from tapmanager.sriov.vf_settings import LINK_STATES, VfSettings

MAC, NETNS = "0a:58:0a:01:00:07", "/run/netns/x"

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "mac": st.sampled_from(["00:00:00:00:00:00", MAC, "02:00:00:00:00:01"]),
    "vlan": st.sampled_from([0, 1, 100, 4095]),
    "qos": st.integers(0, 7),
    "protocol": st.sampled_from(["802.1Q", "802.1ad"]),
    "min_tx_rate": st.sampled_from([0, 10]),
    "max_tx_rate": st.sampled_from([0, 1000]),
    "spoof_check": st.booleans(),
    "link_state": st.sampled_from(LINK_STATES),
    "rss_query": st.booleans(),
    "trust": st.booleans(),
}
SETTINGS = st.fixed_dictionaries(FIELDS).map(lambda fields: VfSettings(**fields))
DROPPED = st.fixed_dictionaries({}, optional=FIELDS)


def made(root: str, owned: VfSettings, dropped: dict[str, Any]) -> tuple[FakeNetCard, NicFunctions, NicFunction]:
    card = FakeNetCard(Path(root))
    card.settings[1], card.dropped = owned, dropped
    functions = NicFunctions(
        PciDrivers(str(card.root), card.write), card, PhysicalFunctions(card, str(card.root), 0.0), str(card.root)
    )
    return card, functions, NicFunction("net1", VFS[1], "iavf", MAC, 1500, (), (), (), owned)


@settings(max_examples=examples(150), deadline=None)
@given(
    owned=SETTINGS,
    dropped=DROPPED,
    taking_fails_at=st.integers(0, 25),
    giving_fails_at=st.integers(0, 25),
    refused=st.sets(st.sampled_from(sorted(FIELDS))),
)
def test_a_card_is_restored_whatever_fails_in_between(
    owned: VfSettings, dropped: dict[str, Any], taking_fails_at: int, giving_fails_at: int, refused: set[str]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        card, functions, function = made(root, owned, dropped)
        card.refused = {"vfio-pci": refused}
        card.fail(taking_fails_at)
        with contextlib.suppress(TapmanagerError):
            functions.take(function)
            assert_holds(card.settings[1], owned)
        card.fail(giving_fails_at)
        with contextlib.suppress(TapmanagerError):
            functions.give_back(function, NETNS)
        card.fail(0)
        functions.give_back(function, NETNS)
        assert (card.driver(VFS[1]), card.override(VFS[1])) == ("iavf", "(null)")
        assert card.inside == {"net1"}
        assert card.settings[0] == FRESH
        # A permission that the card forgot unnoticed cannot be restored.
        now = card.settings[1]
        assert dataclasses.replace(now, trust=None, spoof_check=None) == dataclasses.replace(
            owned, trust=None, spoof_check=None
        )
        assert owned.trust or not now.trust
        assert now.spoof_check or not owned.spoof_check
        if not (taking_fails_at or giving_fails_at or refused):
            assert now == owned


def assert_holds(now: VfSettings, owned: VfSettings) -> None:
    """Checks that a guest has the function."""
    assert now.mac == MAC
    assert (now.vlan, now.qos, now.protocol) == (owned.vlan, owned.qos, owned.protocol)
    assert now.spoof_check or not owned.spoof_check
    assert owned.trust or not now.trust


@settings(max_examples=examples(50), deadline=None)
@given(owned=SETTINGS)
def test_only_the_mac_is_set_on_a_card_that_keeps_its_settings(owned: VfSettings) -> None:
    with tempfile.TemporaryDirectory() as root:
        card, functions, function = made(root, owned, {})
        functions.take(function)
        functions.give_back(function, NETNS)
        assert {line.split("=")[0] for line in card.done} == {"1 mac", f"move eth1 as net1 into {NETNS}"}
        assert card.settings == {0: FRESH, 1: owned}
