"""virtshim looks the sooner at a guest's memory on its way, the less of it is left."""

from __future__ import annotations

import pytest
from fakes.clock import FakeClock

from virtshim.vm.streams import StreamState, wait_for_stream

MIB = 1 << 20


@pytest.mark.parametrize(
    ("left", "least", "most"),
    [(0, 0.001, 0.01), (100 * MIB, 0.005, 0.02), (272 * MIB, 0.01, 0.05), (64 << 30, 0.09, 0.11)],
    ids=["end", "little", "small-guest", "large-guest"],
)
def test_the_less_is_left_the_sooner_virtshim_looks_again(left, least, most):
    clock, looks = FakeClock(), []

    def look() -> StreamState:
        looks.append(clock.monotonic())
        return StreamState(left=left, done=len(looks) == 2)

    wait_for_stream(look, clock, 60, "never")
    assert least <= looks[1] - looks[0] <= most
