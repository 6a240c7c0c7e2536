"""virtshim records how pods start, phase by phase."""

from __future__ import annotations

import pytest
from fakes.clock import FakeClock

from virtshim.metrics.start_ups import StartUps
from virtshim.model.ids import ContainerId, SandboxId

POD = SandboxId("5" * 64)
VM = ContainerId("a" * 64)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def start_ups(clock: FakeClock) -> StartUps:
    return StartUps(clock)


def told(start_ups: StartUps, clock: FakeClock) -> list[tuple[str, float, bool]]:
    now = clock.monotonic()
    return [(phase.name, phase.lasted(now), phase.seconds is not None) for phase in start_ups.start_up(POD).phases]


def test_phases_are_listed_in_the_order_in_which_they_began(start_ups: StartUps, clock: FakeClock) -> None:
    with start_ups.phase("sandbox", POD):
        clock.advance(1)
        with start_ups.phase("cni", POD):
            clock.advance(2)
    start_ups.begin("firmware", POD, VM)
    clock.advance(4)
    assert told(start_ups, clock) == [("sandbox", 3, True), ("cni", 2, True), ("firmware", 4, False)]


def test_a_failed_phase_has_its_error(start_ups: StartUps) -> None:
    with pytest.raises(ValueError, match="no address"), start_ups.phase("cni", POD):
        raise ValueError("no address")
    assert start_ups.start_up(POD).phases[0].error == "no address"


def test_ending_a_phase_that_never_began_does_nothing(start_ups: StartUps) -> None:
    start_ups.end("agent", POD, VM)
    assert start_ups.start_up(POD).phases == ()


def test_all_open_phases_end_with_their_container(start_ups: StartUps, clock: FakeClock) -> None:
    start_ups.begin("firmware", POD, VM)
    start_ups.begin("agent", POD, VM)
    start_ups.end_all(POD, VM, "the VM ended")
    assert [(phase.error, phase.seconds is not None) for phase in start_ups.start_up(POD).phases] == [
        ("the VM ended", True)
    ] * 2


def test_a_removed_pod_is_forgotten_and_the_number_of_pods_is_limited(start_ups: StartUps) -> None:
    start_ups.begin("sandbox", POD)
    start_ups.forget(POD)
    assert start_ups.all() == []
    for number in range(1100):
        start_ups.begin("sandbox", SandboxId(f"{number:064x}"))
    for _ in range(300):
        start_ups.begin("start", POD, VM)
    assert len(start_ups.all()) == 1000
    assert len(start_ups.start_up(POD).phases) == 200
