"""Every hypervisor moves a guest's memory out of one QEMU and into another."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract.hypervisor.worlds import WAIT_LIMIT, A, World
from fakes.waiting import eventually

from virtshim.model.errors import NotFound, ShimError, WrongState
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Disk, Power
from virtshim.vm.guest_needs import GuestCpu, GuestNeeds


@pytest.fixture
def world(world_with_memory: World) -> World:
    return world_with_memory


@contextlib.contextmanager
def collected(begin: Callable[[int], None]) -> Iterator[Callable[[], bytes]]:
    """`begin` gets a pipe; yields what waits for all that comes out of it."""
    read, write = os.pipe2(os.O_CLOEXEC)
    found: list[bytes] = []

    def collect() -> None:
        with open(read, "rb") as source:
            found.append(source.read())

    begin(write)
    os.close(write)
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()

    def everything() -> bytes:
        thread.join(WAIT_LIMIT)
        return found[0]

    yield everything
    everything()


def test_a_guest_continues_in_a_new_qemu_with_its_memory(world: World) -> None:
    domain = world.running()
    definition = world.streams.definition(domain, A)
    assert not world.streams.blockers(domain, A)
    with collected(lambda pipe: world.streams.send(domain, A, pipe)) as everything:
        eventually(lambda: world.streams.state(domain, A).stopped)
        assert world.hypervisor.power(domain).power is Power.PAUSED
        world.streams.go_on(domain, A)
        memory = everything()
    eventually(lambda: world.streams.state(domain, A).done)
    assert world.hypervisor.power(domain).power is Power.PAUSED
    world.hypervisor.destroy(domain, A)

    world.hypervisor.await_memory(domain, A, definition, {})
    assert world.hypervisor.power(domain).power is Power.PAUSED
    with contextlib.ExitStack() as open_:
        read, write = os.pipe2(os.O_CLOEXEC)
        world.streams.receive(domain, A, read)
        os.close(read)
        with open(write, "wb") as sink:
            open_.callback(sink.close)
            sink.write(memory)
    eventually(lambda: world.streams.state(domain, A).done)
    assert world.hypervisor.power(domain).power is Power.PAUSED
    world.pausing.resume(domain, A)
    assert world.hypervisor.power(domain).power is Power.RUNNING


def test_a_saved_guest_continues_in_a_qemu_that_waits_for_memory(world: World, tmp_path: Path) -> None:
    domain, path = world.running(), tmp_path / "memory"
    world.pausing.pause(domain, A)
    world.pausing.save_memory(domain, str(path), 60.0, A)
    world.hypervisor.destroy(domain, A)
    saved = world.streams.saved(str(path))
    assert saved.memory_bytes
    assert world.streams.here(saved.needs).has_machine

    world.hypervisor.await_memory(domain, A, saved.definition, {})
    read, write = os.pipe2(os.O_CLOEXEC)
    world.streams.receive(domain, A, read)
    os.close(read)
    with open(write, "wb") as sink:
        sink.write(path.read_bytes()[saved.begins_at :])
    eventually(lambda: world.streams.state(domain, A).done)
    assert world.hypervisor.power(domain).power is Power.PAUSED
    world.pausing.resume(domain, A)
    assert world.hypervisor.power(domain).power is Power.RUNNING


@pytest.mark.parametrize("world_with_memory", ["qemu"], indirect=True)
def test_a_file_that_libvirt_has_not_saved_is_refused(world: World, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(b"no memory" * 100)
    with pytest.raises(WrongState, match="cannot be sent: it is not a file that libvirt saved"):
        world.streams.saved(str(path))


@pytest.mark.parametrize("world_with_memory", ["qemu"], indirect=True)
def test_qemu_reads_its_disks_when_the_guest_runs_and_not_before(world: World) -> None:
    """The last part of a disk may arrive after the memory: what QEMU has read before would be old."""
    path = world.directory / "disk.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, "1M"], check=True)
    spec = world.spec(disks=(Disk(str(path), DiskFormat.QCOW2, "root"),))
    world.hypervisor.define(spec)
    world.hypervisor.start(spec.uuid)
    domain, definition = spec.uuid, world.streams.definition(spec.uuid, A)
    with collected(lambda pipe: world.streams.send(domain, A, pipe)) as everything:
        eventually(lambda: world.streams.state(domain, A).stopped)
        world.streams.go_on(domain, A)
        memory = everything()
    world.hypervisor.destroy(domain, A)
    world.hypervisor.await_memory(domain, A, definition, {})
    read, write = os.pipe2(os.O_CLOEXEC)
    world.streams.receive(domain, A, read)
    os.close(read)
    with open(write, "wb") as sink:
        sink.write(memory)
    eventually(lambda: world.streams.state(domain, A).done)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ShimError, match="qcow2"):
        world.pausing.resume(domain, A)


def test_a_guest_whose_memory_was_sent_in_vain_runs_on(world: World) -> None:
    domain = world.running()
    with collected(lambda pipe: world.streams.send(domain, A, pipe)):
        eventually(lambda: world.streams.state(domain, A).stopped)
        world.streams.cancel(domain, A)
    eventually(lambda: world.hypervisor.power(domain).power is Power.RUNNING)


def test_a_guest_whose_memory_was_sent_in_vain_can_be_saved(world: World, tmp_path: Path) -> None:
    domain = world.running()
    with collected(lambda pipe: world.streams.send(domain, A, pipe)):
        eventually(lambda: world.streams.state(domain, A).stopped)
        world.streams.cancel(domain, A)
    eventually(lambda: world.hypervisor.power(domain).power is Power.RUNNING)
    world.pausing.pause(domain, A)
    world.pausing.save_memory(domain, str(tmp_path / "memory"), 60.0, A)
    world.pausing.resume(domain, A)
    assert (tmp_path / "memory").stat().st_size


def test_a_guest_that_was_sent_to_the_end_can_run_on_too(world: World) -> None:
    domain = world.running()
    with collected(lambda pipe: world.streams.send(domain, A, pipe)) as everything:
        eventually(lambda: world.streams.state(domain, A).stopped)
        world.streams.go_on(domain, A)
        assert everything()
    eventually(lambda: world.streams.state(domain, A).done)
    world.streams.cancel(domain, A)
    world.pausing.resume(domain, A)
    assert world.hypervisor.power(domain).power is Power.RUNNING


def test_memory_of_something_else_is_refused_with_a_reason(world: World) -> None:
    spec = world.spec()
    world.hypervisor.define(spec)
    world.hypervisor.start(spec.uuid)
    definition = world.streams.definition(spec.uuid, A)
    world.hypervisor.destroy(spec.uuid, A)
    world.hypervisor.await_memory(spec.uuid, A, definition, {})
    read, write = os.pipe2(os.O_CLOEXEC)
    world.streams.receive(spec.uuid, A, read)
    os.close(read)
    with open(write, "wb") as sink:
        sink.write(b"no memory" * 100)

    def is_refused() -> bool:
        try:
            return world.streams.state(spec.uuid, A).failed != ""
        except ShimError:  # QEMU has ended
            return True

    eventually(is_refused)


def test_only_a_running_vm_has_memory(world: World) -> None:
    spec = world.spec()
    world.hypervisor.define(spec)
    with pytest.raises(WrongState):
        world.streams.blockers(spec.uuid, A)
    with pytest.raises(NotFound):
        world.streams.blockers(uuid.uuid4(), A)


def test_a_definition_of_another_vm_is_refused(world: World) -> None:
    domain = world.running()
    definition = world.streams.definition(domain, A).replace(str(domain), str(uuid.uuid4()))
    world.hypervisor.destroy(domain, A)
    with pytest.raises(WrongState):
        world.hypervisor.await_memory(domain, A, definition, {})
    assert not world.hypervisor.power(domain).is_on


def test_a_guest_fits_the_qemu_that_it_runs_in(world: World) -> None:
    domain = world.running()
    needs = world.streams.needs(domain, A)
    here = world.streams.here(needs)
    assert needs.machine.startswith("pc-q35-")
    assert here.qemu == needs.qemu
    assert here.has_machine
    assert not here.lacks_cpu
    with pytest.raises(NotFound):
        world.streams.needs(uuid.uuid4(), A)


@pytest.mark.parametrize("world_with_memory", ["qemu"], indirect=True)
def test_a_guest_whose_definition_names_no_cpu_needs_the_features_of_its_node(world: World) -> None:
    needs = world.streams.needs(world.running(), A)
    assert needs.cpu is not None
    assert needs.cpu.features


@pytest.mark.parametrize("world_with_memory", ["qemu"], indirect=True)
@pytest.mark.parametrize(
    ("needs", "has_machine", "cpu"),
    [
        (GuestNeeds("pc-q35-99.0", (7, 2)), False, ""),
        (GuestNeeds("q35", (7, 2), GuestCpu("qemu64", features={"amx-tile": "require"})), True, "amx-tile"),
        (GuestNeeds("q35", (7, 2), GuestCpu("qemu64", vendor="Nobody")), True, "Nobody"),
        (GuestNeeds("q35", (7, 2), GuestCpu("from-the-future")), True, "from-the-future"),
        (GuestNeeds("q35", (7, 2), GuestCpu("qemu64")), True, ""),
    ],
)
def test_libvirt_says_what_this_nodes_qemu_lacks(world: World, needs: GuestNeeds, has_machine: bool, cpu: str) -> None:
    here = world.streams.here(needs)
    assert here.has_machine is has_machine
    assert cpu in here.lacks_cpu
    assert bool(cpu) == bool(here.lacks_cpu)
