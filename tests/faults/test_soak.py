"""Pod after pod, without and then with kills, nothing fails, nothing leaks and nothing grows."""

from __future__ import annotations

import random

import pytest
from cycles import Soak
from kill_points import how_to_repeat, repeatable, seed
from mortal_node import MortalNode

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(1200)]

CYCLES, EVERY_CYCLE = 40, 100
# Descriptors of a pool appear once; a leak of one per cycle would be 17, or 44 in the long run.
DESCRIPTORS = 12


def test_pod_cycles_with_kills_leave_nothing(mortal: MortalNode, every_point: bool) -> None:
    cycles = EVERY_CYCLE if every_point else CYCLES
    print(f"soak: {how_to_repeat()}")
    with repeatable():
        soak = Soak(mortal, random.Random(f"{seed()} soak"))
        soak.run(lambda: soak.cycles / cycles)
        report = soak.report()
        print(report)
        assert report["failures"] == []
        assert report["leaks"] == []
        assert set(report["daemons"]) == {"virtshim", "tapmanager", "shares"}
        for name, sizes in report["daemons"].items():
            assert sizes["descriptor_growth"] <= DESCRIPTORS, f"{name}: {sizes}"
