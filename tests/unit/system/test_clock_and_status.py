"""Stamps always increase, and the node's status has its conditions."""

import threading
import time

from fakes.clock import FakeClock
from fakes.world import World

from virtshim.system.clock import Stamps, SystemClock


def test_stamps_increase_although_the_clock_stops() -> None:
    stamps = Stamps(FakeClock(), last=0)
    taken = [stamps.next() for _ in range(5)]
    assert taken == sorted(set(taken))


def test_stamps_increase_although_the_clock_is_set_back() -> None:
    clock = FakeClock()
    stamps = Stamps(clock, last=0)
    first = stamps.next()
    clock.set_back(3600)
    assert stamps.next() == first + 1


def test_stamps_continue_after_the_newest_of_an_earlier_process() -> None:
    clock = FakeClock()
    newest = clock.now_ns() + 10**12
    assert Stamps(clock, last=newest).next() == newest + 1


def test_stamps_follow_the_clock_when_it_runs() -> None:
    clock = FakeClock()
    stamps = Stamps(clock, last=0)
    stamps.next()
    clock.advance(5)
    assert stamps.next() == clock.now_ns()


def test_stamps_taken_in_parallel_never_repeat() -> None:
    stamps, taken = Stamps(FakeClock(), last=0), []
    threads = [threading.Thread(target=lambda: taken.extend(stamps.next() for _ in range(100))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 800


def test_sandboxes_and_containers_share_one_order_over_a_restart(world: World) -> None:
    sandbox = world.run()
    container = world.create(sandbox)
    created = [world.sandbox(sandbox).created_at, world.container(container).created_at]
    world.outside.clock.set_back(10**6)
    after = world.recovered()
    created.append(after.sandbox(after.run("later")).created_at)
    after.close()
    assert created == sorted(set(created))


def test_the_system_clock_gives_the_systems_time() -> None:
    clock = SystemClock()
    assert abs(clock.now_ns() - time.time_ns()) < 10**9
    before, now, after = time.monotonic(), clock.monotonic(), time.monotonic()
    assert before <= now <= after
    event = threading.Event()
    assert not clock.wait(event, 0)
    event.set()
    assert clock.wait(event, 60)


def test_both_conditions_are_true_on_a_healthy_node(world: World) -> None:
    assert [(c.name, c.trouble, c.reason) for c in world.do.node.conditions()] == [
        ("RuntimeReady", "", ""),
        ("NetworkReady", "", ""),
    ]


def test_each_condition_has_its_own_problem(world: World) -> None:
    world.outside.vms.why_not = "libvirt cannot be reached"
    assert [c.trouble for c in world.do.node.conditions()] == ["libvirt cannot be reached", ""]
    world.outside.vms.why_not, world.outside.networks.why_not = "", "no CNI configuration"
    assert [(c.trouble, c.reason) for c in world.do.node.conditions()] == [
        ("", ""),
        ("no CNI configuration", "NetworkPluginNotReady"),
    ]


def test_a_state_database_that_is_damaged_makes_the_node_not_ready(world: World) -> None:
    world.damage_database()
    runtime, network = world.do.node.conditions()
    assert "the state database" in runtime.trouble
    assert (runtime.name, runtime.reason) == ("RuntimeReady", "StateDatabaseUnusable")
    assert (network.name, network.trouble, network.reason) == ("NetworkReady", "", "")


def test_the_facts_of_a_container_hold_no_secrets(world: World) -> None:
    _, container = world.running()
    record = world.container(container)
    facts = world.do.node.container_facts(record)
    assert facts["domainUUID"] == record.spec.domain_uuid
    assert "key-of" not in repr(facts) + repr(world.sandbox(record.sandbox_id).network)
