"""virtshim's client asks tapmanager over the wire about functions of a network card. The card is a fake."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.netcard import FRESH, PF, PHYSICAL, VFS, FakeNetCard

from tapmanager import server, verbs
from tapmanager.drivers import PciDrivers
from tapmanager.sriov.nic_functions import NicFunctions
from tapmanager.sriov.physical_function import PhysicalFunctions
from virtshim.devices.driver_client import DeviceDriverClient
from virtshim.devices.values import CardFunction, PciAddress
from virtshim.model.errors import NotFound, Unavailable
from virtshim.pods.tapmanager_connection import TapmanagerConnection


@pytest.fixture
def card(tmp_path: Path) -> FakeNetCard:
    return FakeNetCard(tmp_path / "sys")


@pytest.fixture
def client(card: FakeNetCard, tmp_path: Path) -> Iterator[DeviceDriverClient]:
    drivers = PciDrivers(str(card.root), card.write)
    functions = NicFunctions(drivers, card, PhysicalFunctions(card, str(card.root), 0.0), str(card.root))
    owned = verbs.HostResources(cast("Any", None), cast("Any", None), drivers, functions)
    path = str(tmp_path / "t.sock")
    running = server.Server(
        server.listen(path, os.getegid()), lambda *asked: verbs.perform(owned, *asked), os.geteuid()
    )
    running.start()
    yield DeviceDriverClient(TapmanagerConnection(path))
    running.stop(5.0)


def test_a_network_cards_vf_is_shown_with_its_settings(client: DeviceDriverClient, card: FakeNetCard) -> None:
    card.give(1, vlan=100, qos=3, protocol="802.1ad", rss_query=None)
    found = client.function(PciAddress.parse(VFS[1]), 5.0)
    assert (found.driver, found.card, found.number, found.vlan) == ("iavf", PHYSICAL, 1, "100 (802.1ad)")
    assert found.settings == card.settings[1].to_json()
    assert "rss_query" not in found.settings, "what the card does not say is neither on nor off"


def test_a_vf_without_vlan_has_none(client: DeviceDriverClient, card: FakeNetCard) -> None:
    assert card.settings[0] == FRESH
    assert client.function(PciAddress.parse(VFS[0]), 5.0).vlan == ""


def test_other_functions_are_shown_with_their_driver(client: DeviceDriverClient) -> None:
    assert client.function(PciAddress.parse(PF), 5.0) == CardFunction("ice")


def test_a_function_that_is_gone_is_not_found(client: DeviceDriverClient) -> None:
    with pytest.raises(NotFound, match="no PCI device"):
        client.function(PciAddress.parse("0000:ff:00.0"), 5.0)


def test_without_tapmanager_no_settings_are_shown(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        DeviceDriverClient(TapmanagerConnection(str(tmp_path / "none.sock"))).function(PciAddress.parse(VFS[0]), 1.0)
