"""If the process dies at any step of any use case, the next process repairs the state.

Each use case is run once to count its calls to the outside, then again and again, dying at the first, the second, ... call:
before it has an effect, half-way through it, and after its effect. A new daemon starts over the same database and the same
outside, recovers, and must tell the truth, finish the work when the call is repeated, and leave nothing behind."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.adopted import SANDBOX, adopt
from fakes.adopted import running as running_in_adopted
from fakes.journal import Crash, When
from fakes.power_cuts import PowerCuts
from fakes.waiting import eventually
from fakes.world import IMAGE, World, container_config, sandbox_config

from virtshim.cri.to_proto import container_state, sandbox_state
from virtshim.devices.values import CriDevice
from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.model.container import Container, ContainerPhase, Mount, Resources
from virtshim.model.errors import DeadlineExceeded, ShimError
from virtshim.model.ids import ContainerId
from virtshim.model.image import ImageConfig
from virtshim.model.sandbox import SandboxPhase
from virtshim.pods.lookup import find_any_sandbox, find_container
from virtshim.volumes.mount_script import NOT_MOUNTED
from virtshim.volumes.root_volume import Content


@dataclass(frozen=True)
class Call:
    """A call of kubelet's. `prepare` makes what it needs; `make` is the call, as kubelet repeats it; `done` tells whether it
    has had its effect."""

    prepare: Callable[[World], Any]
    make: Callable[[World, Any], Any]
    done: Callable[[World, Any], bool]


def ids(world: World, prepared: Any) -> tuple[str, str]:
    return prepared[0].value, prepared[1].value


def stop_container(world: World, prepared: Any) -> None:
    found = find_container(world.records, ids(world, prepared)[1])
    if found is not None:
        world.do.stop_container.stop(found, 2)


def start_container(world: World, prepared: Any) -> None:
    found = find_container(world.records, ids(world, prepared)[1])
    assert found is not None
    if found.phase is ContainerPhase.CREATED:  # kubelet looks before it starts
        world.do.start_container.start(found)


def remove_container(world: World, prepared: Any) -> None:
    found = find_container(world.records, ids(world, prepared)[1])
    if found is not None:
        world.do.remove_container.remove(found)


def stop_sandbox(world: World, prepared: Any) -> None:
    found = find_any_sandbox(world.records, ids(world, prepared)[0])
    if found is not None:
        world.do.stop_sandbox.stop(found, world.deadline())


def remove_sandbox(world: World, prepared: Any) -> None:
    found = find_any_sandbox(world.records, ids(world, prepared)[0])
    if found is not None:
        world.do.remove_sandbox.remove(found, world.deadline())


def container_phase(world: World, prepared: Any) -> ContainerPhase | None:
    found = world.records.containers.get(prepared[1])
    return found.phase if found else None


def made_pod(world: World) -> Any:
    sandbox = world.run()
    return sandbox, world.create(sandbox)


VOLUME = "/dev/block/pv"
ON_VOLUME = container_config(devices=(CriDevice(VOLUME, "/"),))
WITH_DISKS = sandbox_config(annotations={"virtshim.io/disks": "a: {size: 1Gi}\nb: {size: 1Gi, format: raw}"})
WITH_DEVICE = container_config(devices=(CriDevice("/dev/vfio/7", "/dev/vfio/7"),))


def pod_for_a_device(world: World) -> Any:
    world.outside.devices.add_function("/dev/vfio/7", "0000:3b:00.1")
    return world.run()


def pod_with_a_device(world: World) -> Any:
    sandbox = pod_for_a_device(world)
    container = world.create(sandbox, config=WITH_DEVICE)
    world.start(container)
    return sandbox, container


def is_clean(world: World) -> bool:
    """The device is nobody's, and was reset before."""
    return not any(c.claims for c in world.records.containers.all()) and world.outside.drivers.resets != []


def deaf_pod(world: World) -> Any:
    pod = world.running()
    world.outside.vms.shuts_down_after = None
    return pod


START, GROWN, SHRUNK = (
    Resources(cpu_quota=100_000 * cpus, cpu_period=100_000, memory_limit_bytes=memory << 20)
    for cpus, memory in ((1, 1024), (2, 2048), (1, 512))
)


def roomy_pod(world: World) -> Any:
    room = {"virtshim.io/max-vcpus": "4", "virtshim.io/max-memory": "2Gi"}
    sandbox = world.run(config=sandbox_config(annotations=room))
    container = world.create(sandbox, config=container_config(resources=START))
    world.start(container)
    return sandbox, container


def resize_to(resources: Resources) -> Callable[[World, Any], None]:
    def resize(world: World, prepared: Any) -> None:
        found = find_container(world.records, ids(world, prepared)[1])
        assert found is not None
        world.do.update_container_resources.resize(found, resources)

    return resize


def has(resources: Resources) -> Callable[[World, Any], bool]:
    return lambda world, prepared: world.container(prepared[1]).resources == resources


def released(world: World, prepared: Any) -> bool:
    found = world.records.sandboxes.get(prepared[0])
    return found is None or found.network_released


def lost_sandbox(world: World) -> None:
    """Its runtime still has it."""
    adopt(world)
    world.outside.networks.lose()
    world.records.sandboxes.replace(world.sandbox(SANDBOX).not_ready("its network is gone"))


def pod_in_adopted(world: World) -> Any:
    return SANDBOX, world.create(adopt(world))


def is_adopted(world: World, prepared: Any) -> bool:
    return world.sandbox(SANDBOX).is_ready and SANDBOX in world.outside.networks.networks


SAYS = ImageConfig(entrypoint=("/bin/x",))


def second_image(world: World) -> str:
    world.outside.files.publish("registry.test/vm/other:2", b"a disk", config=SAYS)
    return world.images.pull("registry.test/vm/other:2", None, threading.Event()).id.value


def says(world: World) -> ImageConfig | None:
    found = world.images.find(IMAGE)
    return found and found.config


def is_whole(world: World) -> bool:
    """The image that was there before is, and has its disk."""
    found = world.images.find(IMAGE)
    return found is not None and says(world) == ImageConfig() and found.digest in world.outside.files.files


CALLS = {
    "pull": Call(
        prepare=lambda world: world.outside.files.publish("registry.test/vm/other:2", b"other disk"),
        make=lambda world, _: world.pull("registry.test/vm/other:2"),
        done=lambda world, _: world.images.find("registry.test/vm/other:2") is not None,
    ),
    "remove image": Call(
        prepare=lambda world: None,
        make=lambda world, _: world.images.remove(IMAGE),
        done=lambda world, _: world.images.find(IMAGE) is None,
    ),
    "pull another image of the disk": Call(
        prepare=lambda world: world.outside.files.publish("registry.test/vm/other:2", b"a disk", config=SAYS),
        make=lambda world, _: world.pull("registry.test/vm/other:2"),
        done=lambda world, _: world.images.find("registry.test/vm/other:2") is not None and is_whole(world),
    ),
    "pull what the name means now": Call(
        prepare=lambda world: world.outside.files.publish(IMAGE, b"a disk", config=SAYS),
        make=lambda world, _: world.pull(),
        done=lambda world, _: says(world) == SAYS and sum(IMAGE in i.tags for i in world.images.all()) == 1,
    ),
    "remove one of two images of a disk": Call(
        prepare=second_image,
        make=lambda world, image: world.images.remove(image),
        done=lambda world, image: world.images.find(image) is None and is_whole(world),
    ),
    "run sandbox": Call(
        prepare=lambda world: None,
        make=lambda world, _: world.run(),
        done=lambda world, _: [s.phase for s in world.records.sandboxes.all()] == [SandboxPhase.READY],
    ),
    "adopt": Call(prepare=lambda world: None, make=lambda world, _: adopt(world), done=is_adopted),
    "adopt again": Call(prepare=lost_sandbox, make=lambda world, _: adopt(world), done=is_adopted),
    "start in an adopted sandbox": Call(
        prepare=pod_in_adopted,
        make=start_container,
        done=lambda world, pod: container_phase(world, pod) is ContainerPhase.RUNNING,
    ),
    "stop an adopted sandbox": Call(
        prepare=lambda world: (SANDBOX, running_in_adopted(world)), make=stop_sandbox, done=released
    ),
    "remove an adopted sandbox": Call(
        prepare=lambda world: (SANDBOX, running_in_adopted(world)),
        make=remove_sandbox,
        done=lambda world, pod: world.records.sandboxes.get(pod[0]) is None,
    ),
    "create": Call(
        prepare=lambda world: world.run(),
        make=lambda world, sandbox: world.create(sandbox),
        done=lambda world, _: [c.phase for c in world.records.containers.all()] == [ContainerPhase.CREATED],
    ),
    "create with a device": Call(
        prepare=pod_for_a_device,
        make=lambda world, sandbox: world.create(sandbox, config=WITH_DEVICE),
        done=lambda world, _: [c.claims for c in world.records.containers.all()] == [("pci:0000:3b:00.1",)],
    ),
    "create on a volume": Call(
        prepare=lambda world: world.run(),
        make=lambda world, sandbox: world.create(sandbox, config=ON_VOLUME),
        done=lambda world, _: (
            [c.phase for c in world.records.containers.all()] == [ContainerPhase.CREATED]
            and world.outside.root_volumes.look(VOLUME).content is Content.ROOT_DISK
        ),
    ),
    "create with empty disks": Call(
        prepare=lambda world: world.run(config=WITH_DISKS),
        make=lambda world, sandbox: world.create(sandbox),
        done=lambda world, _: [c.phase for c in world.records.containers.all()] == [ContainerPhase.CREATED],
    ),
    "start": Call(
        prepare=made_pod,
        make=start_container,
        done=lambda world, pod: container_phase(world, pod) is ContainerPhase.RUNNING,
    ),
    "grow": Call(prepare=roomy_pod, make=resize_to(GROWN), done=has(GROWN)),
    "shrink": Call(prepare=roomy_pod, make=resize_to(SHRUNK), done=has(SHRUNK)),
    "stop": Call(
        prepare=lambda world: world.running(),
        make=stop_container,
        done=lambda world, pod: container_phase(world, pod) is ContainerPhase.EXITED,
    ),
    "stop a deaf guest": Call(
        prepare=deaf_pod,
        make=stop_container,
        done=lambda world, pod: container_phase(world, pod) is ContainerPhase.EXITED,
    ),
    "stop with a device": Call(
        prepare=pod_with_a_device,
        make=stop_container,
        done=lambda world, pod: container_phase(world, pod) is ContainerPhase.EXITED and is_clean(world),
    ),
    "remove a running container with a device": Call(
        prepare=pod_with_a_device,
        make=remove_container,
        done=lambda world, pod: container_phase(world, pod) is None and is_clean(world),
    ),
    "remove a running container": Call(
        prepare=lambda world: world.running(),
        make=remove_container,
        done=lambda world, pod: container_phase(world, pod) is None,
    ),
    "remove a created container": Call(
        prepare=made_pod, make=remove_container, done=lambda world, pod: container_phase(world, pod) is None
    ),
    "stop sandbox": Call(prepare=lambda world: world.running(), make=stop_sandbox, done=released),
    "remove sandbox": Call(
        prepare=lambda world: world.running(),
        make=remove_sandbox,
        done=lambda world, pod: world.records.sandboxes.get(pod[0]) is None,
    ),
}


@dataclass(frozen=True)
class Steps:
    """The calls to the outside that one call of kubelet's makes, from 1 to `count`."""

    count: int
    divisible: tuple[int, ...]

    def at(self, when: When, *, every: bool) -> list[int]:
        """Where to die. A process that dies after a call leaves what one leaves that dies before the next call, so after a call
        it dies at the last one only, unless `every` is wanted. Left half-done is what can be."""
        if when is When.HALF:
            return list(self.divisible)
        if when is When.AFTER and not every:
            return [self.count]
        return list(range(1, self.count + 1))


def steps_of(call: Call, directory: Path) -> Steps:
    directory.mkdir()
    world = World(directory)
    world.pull()
    prepared = call.prepare(world)
    world.journal.forget()
    call.make(world, prepared)
    assert call.done(world, prepared)
    steps = Steps(len(world.journal.calls), tuple(world.journal.divisible))
    world.close()
    return steps


def wrong_sizes(world: World, container: Container) -> list[str]:
    """What of a VM that is, or may be started, is not as its record says."""
    if container.phase not in (ContainerPhase.CREATED, ContainerPhase.RUNNING):
        return []
    vm, told, lies = world.outside.vms.spec(world.domain(container.id)), container.status.size, []
    if (vm.size.vcpus, vm.size.memory_bytes) != (told.vcpus, told.memory_bytes):
        lies.append(f"its size is {told}, and that of its VM {vm.size}")
    groups = [group for group in world.outside.cgroups.cgroups.values() if group.container == container.id]
    if container.is_running and any(group.limits != vm.limits for group in groups):
        lies.append("its VM and its cgroup have different limits")
    return lies


def truth(world: World) -> list[str]:
    """What lists say that is not so."""
    lies = []
    for sandbox in world.records.sandboxes.all():
        sandbox_state(sandbox)
        if sandbox.phase in (SandboxPhase.CREATING, SandboxPhase.REMOVING):
            lies.append(f"sandbox is {sandbox.phase.value} with nobody working on it")
        if sandbox.is_ready and sandbox.id not in world.outside.networks.networks:
            lies.append("sandbox is ready without a network")
    for container in world.records.containers.all():
        container_state(container)
        on = world.outside.vms.power(world.domain(container.id)).is_on
        if on != (container.phase is ContainerPhase.RUNNING):
            lies.append(f"container is {container.phase.value}, and its VM is {'on' if on else 'off'}")
        if on != (container.id in world.outside.consoles.following):
            lies.append(f"console of a VM that is {'on' if on else 'off'} is followed the wrong way")
        if container.phase in (ContainerPhase.CREATING, ContainerPhase.REMOVING):
            lies.append(f"container is {container.phase.value} with nobody working on it")
        lies += wrong_sizes(world, container)
    return lies + world.leftovers()


def take_down(world: World) -> None:
    for sandbox in world.records.sandboxes.all():
        stop_sandbox(world, (sandbox.id, sandbox.id))
        remove_sandbox(world, (sandbox.id, sandbox.id))
    for image in world.images.all():
        world.images.remove(image.id.value)


@pytest.mark.parametrize("when", list(When), ids=lambda when: when.value)
@pytest.mark.parametrize("name", list(CALLS))
def test_recovery_repairs_a_kill_at_any_step(
    name: str, when: When, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    call = CALLS[name]
    steps = steps_of(call, tmp_path / "count")
    for step in steps.at(when, every=pytestconfig.getoption("--all")):
        where = f"{name}, died {when.value} call {step}"
        directory = tmp_path / str(step)
        directory.mkdir()
        world = World(directory)
        world.pull()
        prepared = call.prepare(world)
        world.journal.crash(step, when)
        with pytest.raises(Crash):
            call.make(world, prepared)
        where += f" ({world.journal.calls[-1]})"

        world = world.recovered()
        assert truth(world) == [], where

        call.make(world, prepared)
        assert call.done(world, prepared), where
        assert truth(world) == [], where

        take_down(world)
        assert world.everything() == [], where
        assert world.outside.files.files == {}, where
        world.close()


@pytest.mark.parametrize("name", ["run sandbox", "create", "create with a device", "create on a volume"])
def test_a_power_cut_takes_a_row_only_while_nothing_needs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, cuts = CALLS[name], PowerCuts(monkeypatch)
    lost = []
    for step in range(1, steps_of(call, tmp_path / "count").count + 1):
        cuts.directory = tmp_path / str(step)
        cuts.directory.mkdir()
        world = World(cuts.directory)
        world.pull()
        prepared = call.prepare(world)
        world.journal.crash(step, When.AFTER)
        with pytest.raises(Crash):
            call.make(world, prepared)
        where = f"{name}, power cut after call {step} ({world.journal.calls[-1]})"
        world.close()
        lost.append(cuts.strike())
        world = world.recovered(rebooted=True)
        assert truth(world) == [], where
        take_down(world)
        assert world.everything() == [], where
        world.close()
    assert any(lost) == (name in ("run sandbox", "create"))


@pytest.mark.parametrize("name", list(CALLS))
def test_recovery_repairs_a_kill_with_a_reboot_at_any_step(name: str, tmp_path: Path) -> None:
    call = CALLS[name]
    for step in range(1, steps_of(call, tmp_path / "count").count + 1):
        directory = tmp_path / str(step)
        directory.mkdir()
        world = World(directory)
        world.pull()
        prepared = call.prepare(world)
        world.journal.crash(step, When.AFTER)
        with pytest.raises(Crash):
            call.make(world, prepared)
        where = f"{name}, died after call {step} ({world.journal.calls[-1]})"
        world = world.recovered(rebooted=True)
        assert truth(world) == [], where
        take_down(world)
        assert world.everything() == [], where
        world.close()


def lacks_its_volume(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
    return CommandResult(NOT_MOUNTED if "virtshim-volumes" in command.argv else 0, b"", b"/data: Not a directory\n")


def look_into_a_guest_without_its_volume(world: World, step: int, when: When) -> ContainerId | None:
    """Its agent was silent until now, and says at the first command that a volume is missing. The process dies at the call to the
    outside with that number; None if there are not so many calls."""

    def is_silent(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        world.outside.clock.advance(timeout)
        raise DeadlineExceeded("timed out waiting for the guest agent")

    world.outside.guests.do = is_silent
    made = world.create(world.run(), config=container_config(mounts=(Mount("/data", "/srv"),)))
    world.start(made)
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
    world.outside.guests.do = lacks_its_volume
    before = len(world.journal.calls)
    world.journal.crash(step, when)
    with contextlib.suppress(Crash):
        world.do.exec_command.run(world.container(made), ("true",), 60.0, threading.Event())
    eventually(lambda: len(world.journal.calls) >= before + step or world.container(made).exit)
    return made if len(world.journal.calls) >= before + step else None


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # it dies in the command's thread, too
@pytest.mark.parametrize("when", list(When), ids=lambda when: when.value)
def test_recovery_repairs_a_kill_while_a_missing_volume_ends_a_container(when: When, tmp_path: Path) -> None:
    for step in range(1, 100):
        directory = tmp_path / str(step)
        directory.mkdir()
        world = World(directory)
        world.pull()
        made = look_into_a_guest_without_its_volume(world, step, when)
        if made is None:
            world.close()
            break
        where = f"died {when.value} call {step} ({world.journal.calls[-1]})"
        world = world.recovered()
        eventually(lambda world=world, made=made: world.container(made).exit)  # type: ignore[misc]
        how = world.container(made).exit
        assert how is not None
        assert (how.code, how.message[:46]) == (128, "the volumes cannot be mounted in the guest: /d"), where
        told = world.outside.consoles.logs[world.container(made).spec.log_file]
        assert 1 <= len([line for line in told if "volumes_not_mounted: " in line]) <= 2, where
        eventually(lambda world=world: truth(world) == [])  # type: ignore[misc]
        take_down(world)
        assert world.everything() == [], where
        world.close()
    assert step > 3, "it was killed before, while and after it was recorded"


def test_the_next_recovery_repairs_a_kill_during_recovery(tmp_path: Path) -> None:
    """A pod of every kind is there: half-made, running, ended meanwhile, half-removed; and a stray directory."""

    def broken_world(directory: Path) -> World:
        directory.mkdir()
        world = World(directory)
        world.pull()
        world.running("runs")
        _, ended = world.running("ended")
        _, removed = world.running("half-removed")
        half_made = world.run("half-made")
        world.journal.fail("disks.delete", ShimError("busy"), times=3)
        with pytest.raises(ShimError):
            world.remove(removed)
        world.journal.fail("records.containers.replace", ShimError("disk full"), times=2)
        with pytest.raises(ShimError):
            world.create(half_made)
        world.journal.crash(2, When.HALF)
        with pytest.raises(Crash):
            world.run("half-run")
        world.outside.vms.destroy(world.domain(ended), ended)
        return world.restarted()

    def healthy(world: World) -> None:
        assert truth(world) == []
        assert len(world.outside.vms.running()) == 1
        take_down(world)
        assert world.everything() == []
        world.close()

    world = broken_world(tmp_path / "count")
    world.app.recovery.recover.run(rebooted=False)
    steps = len(world.journal.calls)
    healthy(world)
    for step in range(1, steps + 1):
        world = broken_world(tmp_path / str(step))
        world.journal.crash(step, When.HALF)
        with pytest.raises(Crash):
            world.app.recovery.recover.run(rebooted=False)
        healthy(world.recovered())
