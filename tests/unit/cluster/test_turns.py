"""Which VM's turn it is."""

from fakes.clock import FakeClock

from virtshim.cluster.turns import Turns

VM, OTHER = ("shop", "db"), ("shop", "web")


def test_the_earliest_alarm_of_a_vm_is_the_only_one() -> None:
    clock = FakeClock()
    turns, now = Turns(clock), clock.now_ns() / 1e9
    turns.touch_at(VM, now + 20)
    turns.touch_at(VM, now + 5)
    turns.touch_at(OTHER, now + 25)
    assert turns.take() == VM
    assert clock.now_ns() / 1e9 < now + 6
    turns.done(VM)
    assert turns.take() == OTHER
