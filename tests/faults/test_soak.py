"""Pod after pod, then with kills: nothing fails, nothing leaks, nothing grows."""

from __future__ import annotations

import random

import pytest
from cycles import Soak
from mortal_node import MortalNode

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(1200)]

CYCLES = 100
# Descriptors of a pool come once; a leak of one a cycle would be 45.
DESCRIPTORS = 12


def test_a_hundred_pod_cycles_with_kills_leave_nothing(mortal: MortalNode) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"soak: seed {seed}")
    soak = Soak(mortal, random.Random(seed))
    soak.run(lambda: soak.cycles / CYCLES)
    report = soak.report()
    print(report)
    assert report["failures"] == []
    assert report["leaks"] == []
    for name, sizes in report["daemons"].items():
        assert sizes["descriptor_growth"] <= DESCRIPTORS, f"{name}: {sizes}"
