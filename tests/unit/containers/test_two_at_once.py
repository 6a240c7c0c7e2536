"""Two calls at once do not undo what the other one relies on."""

from __future__ import annotations

import threading

import pytest
from fakes.background import Background
from fakes.waiting import eventually
from fakes.world import World, sandbox_config

from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId

KEEP = sandbox_config(annotations={"virtshim.io/root-disk": "pod"})
# Seconds in which a call that nothing holds up ends. One that is held up costs them.
A_MOMENT = 0.5


def run_on_kept_disk(world: World, attempt: int = 0) -> ContainerId:
    made = world.create(world.run(attempt=attempt, config=KEEP))
    world.start(made)
    return made


def has_its_disk(world: World, container: ContainerId) -> bool:
    return world.container(container).spec.pod_disk in world.outside.disks.pod_disks


# --- a guest that restarts


def test_a_guest_that_restarts_while_its_set_up_fails_is_set_up_again(world: World) -> None:
    runs = 0

    def restarts_once(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        nonlocal runs
        runs += 1
        if runs == 1:
            (container,) = world.records.containers.all()
            world.app.guest_set_up.changed(container.domain_uuid)
            raise InternalError("the guest agent knows no such process")
        return CommandResult(0, b"", b"")

    world.outside.guests.do = restarts_once
    container = world.create(world.run(config=sandbox_config(sysctls={"net.core.somaxconn": "321"})))
    world.start(container)
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
    assert runs == 2


# --- a pod's kept disk


def test_the_disk_of_a_pod_that_comes_back_during_a_look_at_leftovers_stays(world: World) -> None:
    first = world.run(config=KEEP)
    disk = world.container(world.create(first)).spec.pod_disk
    image = world.outside.disks.pod_disks[disk]
    world.remove_sandbox(first)
    world.outside.disks.pod_disks[disk] = image  # as after a database that was lost
    world.outside.disks.directories[ContainerId("9" * 64)] = set()  # goes before the disks
    world.app.recovery.reconcile.look()
    world.outside.clock.advance(61)
    gate = world.journal.hold("disks.delete")
    look = Background(world.app.recovery.reconcile.look)
    gate.wait()
    again = run_on_kept_disk(world, attempt=1)
    gate.open()
    look.done()
    assert has_its_disk(world, again)


def test_the_next_attempt_does_not_get_a_disk_that_is_being_removed(world: World) -> None:
    first = world.run(config=KEEP)
    world.create(first)
    gate = world.journal.hold("disks.delete_pod_disks")
    removal = Background(lambda: world.remove_sandbox(first))
    gate.wait()
    start = world.journal.hold("vms.start")
    attempt = Background(lambda: run_on_kept_disk(world, attempt=1))
    start.reached.wait(A_MOMENT)
    start.open()
    gate.open()
    removal.done()
    attempt.done()
    (container,) = world.records.containers.all()
    assert has_its_disk(world, container.id)


def test_pods_do_not_wait_for_another_pods_disks(world: World) -> None:
    first = world.run(config=KEEP)
    world.create(first)
    gate = world.journal.hold("disks.delete_pod_disks")
    removal = Background(lambda: world.remove_sandbox(first))
    gate.wait()
    world.running("another")
    gate.open()
    removal.done()


# --- a QEMU that hangs


def test_a_vm_that_hangs_while_it_is_destroyed_delays_no_other_pod_and_no_pull(world: World) -> None:
    named = sandbox_config(annotations={"VirtletSystemUUID": "53008994-44c0-4017-ad44-9c49758083da"})
    sandbox = world.run(config=named)
    failed = world.create(sandbox)
    world.journal.fail("vms.start", InternalError("no"), after=True)
    world.journal.fail("vms.destroy", InternalError("its QEMU hangs"))
    with pytest.raises(InternalError):
        world.start(failed)
    gate = world.journal.hold("vms.destroy")
    again = Background(lambda: world.create(sandbox, attempt=1))
    gate.wait()
    others = Background(lambda: (world.pull("registry.test/vm/other:1"), world.create(world.run("another"))))
    others_are_through = others.ended_within(10)
    gate.open()
    again.done()
    others.done()
    assert others_are_through
