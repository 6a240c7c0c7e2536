"""A guest comes from a template (virtshim.io/warm-start), or boots, and the log says why."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.background import Background
from fakes.journal import Crash, When
from fakes.lasting import logged
from fakes.power_cuts import PowerCuts
from fakes.waiting import eventually
from fakes.world import IMAGE, World, container_config, sandbox_config

from virtshim.model.container import ContainerPhase, ExitReason, Resources
from virtshim.model.errors import Aborted, InternalError, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import Power
from virtshim.templates.guest_identity import BECOME, PROBE

WARM = sandbox_config(annotations={"virtshim.io/warm-start": "true"})
SMALL = Resources(memory_limit_bytes=128 << 20)
ROOM = 1 << 30
# Seconds in which a call that nothing holds up ends. One that is held up costs them.
A_MOMENT = 5


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, templates={"max_bytes": ROOM})
    made.pull()
    yield made
    made.close()


def created(world: World, pod: str, memory: Resources = SMALL) -> ContainerId:
    return world.create(world.run(pod, config=WARM), config=container_config(resources=memory))


def started(world: World, pod: str, memory: Resources = SMALL) -> ContainerId:
    container = created(world, pod, memory)
    world.start(container)
    return container


def kept(world: World) -> int:
    return len(world.app.warm.templates.kept())


def with_template(world: World) -> None:
    """The first pod boots, and its machine's template is made."""
    world.remove(started(world, "first"))
    eventually(lambda: kept(world) == 1)


def boots(world: World, container: ContainerId) -> int:
    return world.outside.vms.domains[world.domain(container)].boots


def becoming(world: World) -> list[tuple[ContainerId, tuple[str, ...], bytes]]:
    """The guests that were told who they are, with what they were told."""
    return [(one, words, data) for one, script, words, data in world.outside.guests.scripts if script == BECOME]


def half_made(world: World) -> list[str]:
    """Directories of templates."""
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(world.settings.layout().templates)
    return []


def own_disk_is_back(world: World, container: ContainerId) -> bool:
    names = os.listdir(world.settings.layout().container_dir(container))
    return "root.qcow2" in names and not [name for name in names if name != "root.qcow2"]


def test_a_node_that_allows_no_templates_boots_the_guest_and_the_log_says_why(tmp_path):
    world = World(tmp_path)
    world.pull()
    container = started(world, "web")
    assert boots(world, container) == 1
    assert any("templates.max_bytes" in line for line in logged(world))
    world.close()


def test_the_first_guest_boots_and_the_next_one_comes_from_its_template(world):
    first = started(world, "first")
    assert boots(world, first) == 1
    assert any("one is being made" in line for line in logged(world))
    eventually(lambda: kept(world) == 1)
    second = started(world, "second")
    assert boots(world, second) == 0
    assert world.outside.vms.power(world.domain(second)).power is Power.RUNNING
    found = world.container(second)
    assert found.is_running
    assert found.status.warm_started


def test_nothing_of_a_template_has_a_name_once_it_is_made(world):
    with_template(world)
    assert half_made(world) == []
    assert [one.name for one in world.outside.vms.owned()] == []


def test_guests_of_one_template_get_names_and_random_numbers_of_their_own(world):
    with_template(world)
    one, two = started(world, "one"), started(world, "two")
    (first, told_first, seed_first), (second, told_second, seed_second) = becoming(world)
    assert [first, second] == [one, two]
    assert seed_first != seed_second
    assert len(seed_first) == 16 + 64  # the time comes first
    assert int.from_bytes(seed_first[:8], "little") == world.outside.clock.now_ns() // 10**9
    machine_ids = {told_first[2], told_second[2]}
    assert len(machine_ids) == 2
    assert all(len(one) == 32 for one in machine_ids)
    for container, told in ((one, told_first), (two, told_second)):
        network = world.sandbox(world.container(container).sandbox_id).network
        assert network is not None
        assert network.interfaces[0].mac in told


def test_the_record_says_running_only_when_the_guest_is_one_of_its_own(world):
    with_template(world)
    container = created(world, "web")
    phases = []

    def become(guest: ContainerId) -> tuple[int, str]:
        phases.append(world.container(guest).phase)
        return 0, ""

    world.outside.guests.script_result = become
    world.start(container)
    assert phases == [ContainerPhase.CREATED]


def test_the_agent_of_a_guest_from_a_template_finds_a_connection_when_the_guest_continues(world):
    with_template(world)
    container = created(world, "web")
    connected = []
    world.journal.on_call = lambda name: connected.extend(
        world.outside.guests.connected if name == "vms.resume" else ()
    )
    world.start(container)
    assert connected == [container]


def test_a_template_is_copied_while_its_agent_is_connected(world):
    forgotten = []
    world.journal.on_call = lambda name: name == "streams.go_on" and forgotten.extend(world.outside.guests.forgotten)
    with_template(world)
    assert not {one for one, script, *_ in world.outside.guests.scripts if script == PROBE} & {*forgotten}


def test_a_guest_that_cannot_become_one_of_its_own_boots_from_its_own_disk_instead(world):
    with_template(world)
    world.outside.guests.script_result = lambda _guest: (91, "the kernel takes no random numbers")
    container = started(world, "web")
    assert boots(world, container) == 1
    assert not world.container(container).status.warm_started
    assert own_disk_is_back(world, container)
    assert any("the kernel takes no random numbers" in line for line in logged(world))
    assert kept(world) == 0  # the template is of no use


@pytest.mark.parametrize(
    "call", ["template_vms.await_devices", "streams.receive", "vms.resume", "guest_operations.run_script"]
)
def test_a_start_that_fails_at_any_step_boots_the_guest_in_the_same_call(world, call):
    with_template(world)
    container = created(world, "web")
    world.journal.fail(call, InternalError("broken"))
    world.start(container)
    assert boots(world, container) == 1
    assert own_disk_is_back(world, container)
    assert any("broken" in line for line in logged(world))


def no_descriptor(_descriptor: int) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_start_without_a_free_descriptor_boots_the_guest(world, monkeypatch):
    with_template(world)
    container = created(world, "web")
    monkeypatch.setattr(os, "dup", no_descriptor)
    world.start(container)
    assert boots(world, container) == 1
    assert own_disk_is_back(world, container)
    assert any("Too many open files" in line for line in logged(world))


def test_a_template_that_cannot_be_begun_is_tried_again_with_the_next_guest(world, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(os, "dup", no_descriptor)
        started(world, "web")
    assert any("none can be made now" in line for line in logged(world))
    with_template(world)


def test_a_guest_whose_qemu_cannot_be_ended_does_not_boot_from_the_disk_of_the_template(world):
    with_template(world)
    container = created(world, "web")
    world.journal.fail("streams.receive", InternalError("broken"))
    world.journal.fail("vms.destroy", Unavailable("libvirt is restarting"))
    with pytest.raises(Unavailable):
        world.start(container)
    assert boots(world, container) == 0
    assert world.container(container).phase is ContainerPhase.EXITED
    assert not world.outside.vms.power(world.domain(container)).is_on


# Each call ends a pod whose guest is still being made.
ENDS: list[Callable[[World, ContainerId], object]] = [
    lambda world, container: world.do.stop_container.stop(world.container(container), 30.0),
    lambda world, container: world.do.stop_container.stop(world.container(container), 0.0),
    lambda world, container: world.stop_sandbox(world.container(container).sandbox_id),
    lambda world, container: world.remove_sandbox(world.container(container).sandbox_id),
]


@pytest.mark.parametrize("end", ENDS, ids=["stop", "kill", "stop-pod", "remove-pod"])
def test_a_call_that_ends_the_pod_does_not_wait_for_a_guest_that_is_made_of_a_template(world, end):
    with_template(world)
    container = created(world, "web")
    domain = world.domain(container)
    world.outside.guests.scripts_hang = True
    start = Background(lambda: world.start(container))
    eventually(lambda: becoming(world))
    ended = Background(lambda: end(world, container))
    assert ended.ended_within(A_MOMENT)
    ended.done()
    with pytest.raises(Aborted, match="is being stopped"):
        start.done()
    assert not world.outside.vms.power(domain).is_on
    world.outside.guests.scripts_hang = False
    assert boots(world, started(world, "next")) == 0  # it was not the template's fault


def test_a_start_from_a_template_that_was_given_up_leaves_the_record_and_the_disk_as_any_failed_start(world):
    with_template(world)
    container = created(world, "web")
    world.outside.guests.scripts_hang = True
    start = Background(lambda: world.start(container))
    eventually(lambda: becoming(world))
    world.stop(container)
    with pytest.raises(Aborted):
        start.done()
    found = world.container(container)
    assert found.phase is ContainerPhase.EXITED
    assert found.exit is not None
    assert found.exit.reason is ExitReason.START_ERROR
    assert "is being stopped" in found.exit.message
    assert own_disk_is_back(world, container)


def test_a_template_whose_vm_could_not_be_ended_is_ended_later(world):
    world.journal.on_call = lambda name: (
        name == "template_files.seal" and pytest.fail("its VM may still write to the memory")
    )
    world.journal.fail("streams.send", InternalError("broken"))
    world.journal.fail("vms.destroy", Unavailable("libvirt is restarting"))
    world.start(created(world, "first"))
    eventually(lambda: world.journal.count("vms.destroy") > 1)
    eventually(lambda: [one.name for one in world.outside.vms.owned() if "template" in one.name] == [])


def test_a_guest_that_refuses_what_copies_need_gets_no_template_and_the_log_says_what(world):
    world.outside.guests.script_result = lambda _guest: (92, "the image has neither cloud-init nor a program for it")
    world.remove(started(world, "first"))
    eventually(lambda: not world.app.warm.templates.facts()["making"])
    assert not world.outside.vms.owned()
    second = started(world, "second")
    assert boots(world, second) == 1
    assert any("neither cloud-init" in line for line in logged(world))
    assert len([1 for _, script, *_ in world.outside.guests.scripts if script == PROBE]) == 1  # nobody asks again


def test_a_template_that_could_not_be_made_is_tried_again_later(world):
    world.outside.template_vms.error = Unavailable("libvirt is restarting")
    world.remove(started(world, "first"))
    eventually(lambda: not world.app.warm.templates.facts()["making"])
    world.outside.template_vms.error = None
    world.remove(started(world, "second"))
    assert any("libvirt is restarting" in line for line in logged(world))
    world.outside.clock.advance(601)
    world.remove(started(world, "third"))
    eventually(lambda: kept(world) == 1)


def test_a_guest_with_more_memory_than_all_templates_may_take_boots(world):
    world.remove(started(world, "first", Resources(memory_limit_bytes=2 << 30)))
    eventually(lambda: not world.app.warm.templates.facts()["making"])
    world.remove(started(world, "second", Resources(memory_limit_bytes=2 << 30)))
    assert any("larger than templates.max_bytes" in line for line in logged(world))
    assert kept(world) == 0


@pytest.mark.parametrize(("boot", "least", "most"), [(1, 9, 10), (30, 29, 31), (500, 59, 60)])
def test_a_start_from_a_template_may_take_about_as_long_as_a_boot_but_no_more_than_a_minute(world, boot, least, most):
    world.outside.template_vms.on_boot = lambda: world.outside.clock.advance(boot)
    with_template(world)
    started(world, "web")
    assert least < world.outside.guests.script_limits[-1] <= most


def test_the_time_until_qemu_waits_is_part_of_the_time_for_a_start_from_a_template(world):
    with_template(world)
    container = created(world, "web")
    world.journal.on_call = lambda name: name == "streams.receive" and world.outside.clock.advance(7)
    world.start(container)
    assert 0 < world.outside.guests.script_limits[-1] <= 3


def test_the_node_tells_which_images_start_from_templates_and_why_others_boot(world):
    assert world.do.node.facts()["templates"] == {"limitBytes": ROOM, "kept": [], "making": 0, "unfit": []}
    with_template(world)
    world.outside.guests.script_result = lambda _guest: (92, "the image has neither cloud-init nor a program for it")
    world.remove(started(world, "other", Resources(memory_limit_bytes=256 << 20)))
    eventually(lambda: not world.app.warm.templates.facts()["making"])
    told = world.do.node.facts()["templates"]
    (kept_one,), (unfit,) = told["kept"], told["unfit"]
    assert kept_one["image"] == unfit["image"] == container_config().image
    assert 0 < kept_one["bytes"] < ROOM
    assert "neither cloud-init" in unfit["why"]


def test_a_container_tells_whether_its_guest_came_from_a_template(world):
    first = started(world, "first")
    eventually(lambda: kept(world) == 1)
    second = started(world, "second")
    facts = [world.do.node.container_facts(world.container(one)) for one in (first, second)]
    assert [one["fromTemplate"] for one in facts] == [False, True]


def test_another_size_or_another_qemu_needs_another_template(world):
    with_template(world)
    larger = started(world, "larger", Resources(memory_limit_bytes=256 << 20))
    assert boots(world, larger) == 1
    world.outside.template_vms.version = "8.0"
    assert boots(world, started(world, "later")) == 1


def test_a_template_is_lost_with_its_process_and_made_again(world):
    with_template(world)
    later = world.recovered()
    assert boots(later, started(later, "web")) == 1
    assert any("there is no template of it yet" in line for line in logged(later))
    eventually(lambda: kept(later) == 1)
    assert boots(later, started(later, "next")) == 0
    later.close()


def test_a_template_of_an_image_that_was_replaced_is_not_used(world):
    with_template(world)
    world.outside.files.publish(IMAGE, b"a newer disk")
    world.pull()
    assert boots(world, started(world, "web")) == 1
    assert any("there is no template of it yet" in line for line in logged(world))


def test_templates_are_of_no_use_once_the_node_does_not_allow_them(world):
    with_template(world)
    world.app.live.template_bytes.now = 0
    assert boots(world, started(world, "web")) == 1


def test_a_vm_that_outlives_its_pods_boots_and_the_log_says_why(world):
    config = sandbox_config(annotations={"virtshim.io/warm-start": "true", "virtshim.io/vm": "db"})
    container = world.create(world.run("db", config=config), config=container_config(resources=SMALL))
    world.start(container)
    assert boots(world, container) == 1
    assert any("outlives the container" in line for line in logged(world))


def test_the_memory_of_a_guest_from_a_template_cannot_shrink(world):
    with_template(world)
    container = started(world, "web")
    with pytest.raises(WrongState, match="came from a template"):
        world.do.update_container_resources.resize(world.container(container), Resources(memory_limit_bytes=64 << 20))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread dies with its process
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
@pytest.mark.parametrize(
    "call",
    [
        "template_files.begin",
        "template_vms.define",
        "template_vms.boot",
        "streams.send",
        "vms.destroy",
        "template_files.seal",
    ],
)
def test_a_killed_virtshim_leaves_nothing_of_a_template_that_it_was_making(world, call, when):
    reached = world.journal.hold("template_files.memory")
    world.start(created(world, "first"))
    reached.wait()
    world.journal.on_call = lambda name: world.journal.crash(1, when) if name == call else None
    reached.open()
    eventually(lambda: world.journal.is_dead and not world.app.warm.templates.facts()["making"])
    world.journal.on_call = lambda _name: None
    later = world.recovered()
    later.app.warm.templates.remove_leftovers()
    assert [one.name for one in later.outside.vms.owned() if "template" in one.name] == []
    assert half_made(later) == []
    later.close()


def warm_pod(world: World) -> ContainerId:
    with_template(world)
    return created(world, "web")


def test_a_kill_at_any_step_of_a_start_leaves_no_guest_that_is_not_one_of_its_own(tmp_path):
    steps = 0
    at = 1
    while at <= max(steps, 1):
        for when in (When.BEFORE, When.AFTER):
            (tmp_path / f"{at}-{when.value}").mkdir()
            world = World(tmp_path / f"{at}-{when.value}", templates={"max_bytes": ROOM})
            world.pull()
            container = warm_pod(world)
            before = len(world.journal.calls)
            world.journal.crash(at, when)
            with contextlib.suppress(Crash):
                world.start(container)
            steps = max(steps, len(world.journal.calls) - before) if not world.journal.is_dead else steps
            steps = max(steps, at + 1) if world.journal.is_dead else steps
            told = len(becoming(world))
            world = world.recovered()
            found, power = world.container(container), world.outside.vms.power(world.domain(container))
            assert found.is_running == power.is_on
            if found.is_running and not boots(world, container):
                assert told == 1
            if found.phase is ContainerPhase.CREATED:
                world.start(found.id)
            assert world.container(container).is_running
            assert own_disk_is_back(world, container)
            world.close()
        at += 1
    assert steps > 10


def test_a_power_cut_at_any_step_of_a_start_takes_only_what_nothing_needs(tmp_path, monkeypatch):
    cuts, lost, ended = PowerCuts(monkeypatch), [], False
    while not ended:
        cuts.directory = tmp_path / str(len(lost))
        cuts.directory.mkdir()
        world = World(cuts.directory, templates={"max_bytes": ROOM})
        world.pull()
        container = warm_pod(world)
        world.journal.crash(len(lost) + 1, When.AFTER)
        try:
            world.start(container)
            ended = True
        except Crash:
            pass
        world.close()
        lost.append(cuts.strike())
        world = world.recovered(rebooted=True)
        assert not world.container(container).is_running
        for sandbox in world.records.sandboxes.all():
            world.remove_sandbox(sandbox.id)
        assert world.everything() == []
        world.close()
    assert any(lost)
    assert not lost[-1]
