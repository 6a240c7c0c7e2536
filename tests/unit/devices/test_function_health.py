"""A function is unfit for any VM if it does not answer, its reset failed, or it reported fatal errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import structlog
from fakes.sysfs import FakeSysfs

from virtshim.devices.function_health import AerCounts, FunctionHealth
from virtshim.devices.pci import FUNCTIONS, PciBus
from virtshim.devices.values import DeviceCondition, PciAddress
from virtshim.model.errors import WrongState

TEXT = "0000:3b:00.1"
ADDRESS = PciAddress.parse(TEXT)
# The first bytes of a VF: with SR-IOV it answers with ones for vendor and device, and for nothing else.
VIRTUAL = b"\xff\xff\xff\xff\x06\x00\x10\x00" + bytes(56)


class Node:
    def __init__(self, root: Path) -> None:
        self.sysfs = FakeSysfs(root)
        self.sysfs.pci(TEXT, 7, driver="vfio-pci")
        self.sysfs.registers(TEXT, VIRTUAL)
        self.known: dict[str, DeviceCondition] = {}
        self.unreadable = False
        self.plugin_starts()

    def plugin_starts(self) -> None:
        self._health = FunctionHealth(AerCounts(self.sysfs.files()), self._conditions)

    def _conditions(self) -> Mapping[str, DeviceCondition]:
        if self.unreadable:
            raise WrongState("the state database cannot be read")
        return dict(self.known)

    def know(self, **facts: object) -> None:
        condition = DeviceCondition(ADDRESS, **facts)  # type: ignore[arg-type]
        self.known[condition.claim] = condition

    def count(self, fatal: int) -> None:
        self.sysfs.write(f"{FUNCTIONS}/{TEXT}/aer_dev_fatal", f"DLP 0\nTOTAL_ERR_FATAL {fatal}\n")
        self.sysfs.write(f"{FUNCTIONS}/{TEXT}/aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 0\n")

    def trouble(self) -> str:
        return self._health.look(PciBus(self.sysfs.files()).functions()).get(ADDRESS, "")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_virtual_function_that_answers_is_healthy(node: Node) -> None:
    assert node.trouble() == ""


def test_a_function_that_reads_as_all_ones_is_dead_until_it_answers(node: Node) -> None:
    node.sysfs.registers(TEXT, b"\xff" * 4096)
    assert "does not answer" in node.trouble()
    node.sysfs.registers(TEXT, VIRTUAL)
    assert node.trouble() == ""


def test_an_unreadable_function_is_not_taken_for_dead(node: Node) -> None:
    node.sysfs.registers(TEXT, b"")
    assert node.trouble() == ""


def test_a_failed_reset_counts_until_a_reset_works(node: Node) -> None:
    node.know(reset_failed_at=1_800_000_000 * 10**9, error="timed out")
    assert node.trouble() == "could not be reset at 2027-01-15 08:00:00 UTC (timed out)"
    node.known.clear()
    assert node.trouble() == ""


def test_the_last_known_state_counts_while_the_database_is_unreadable(node: Node) -> None:
    node.know(reset_failed_at=1, error="timed out")
    before = node.trouble()
    node.unreadable = True
    with structlog.testing.capture_logs() as logs:
        assert [node.trouble(), node.trouble()] == [before, before]
    assert [line["event"] for line in logs] == ["device.conditions_not_read"]


def test_fatal_errors_from_before_the_start_are_ignored(node: Node) -> None:
    node.count(3)
    assert node.trouble() == ""
    assert node.trouble() == ""


def test_new_fatal_errors_count_until_the_function_is_reset(node: Node) -> None:
    node.count(3)
    node.trouble()
    node.count(5)
    assert "2 fatal PCI Express errors" in node.trouble()
    assert "2 fatal" in node.trouble(), "looking does not forgive"
    node.know(fatal=5)
    assert node.trouble() == ""
    node.count(6)
    assert "1 fatal PCI Express error;" in node.trouble()


def test_a_restarted_plugin_counts_from_zero(node: Node) -> None:
    node.count(0)
    node.trouble()
    node.count(1)
    assert node.trouble()
    node.plugin_starts()
    assert node.trouble() == ""


def test_counts_start_from_zero_when_the_kernel_finds_the_device_again(node: Node) -> None:
    node.know(fatal=9)
    node.count(9)
    node.trouble()
    node.count(0)
    assert node.trouble() == ""
    node.count(1)
    assert "1 fatal" in node.trouble()
