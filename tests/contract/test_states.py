"""Changes of a VM by virsh show in its container, with the services on libvirt's test driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import libvirt
import pytest
from fakes.world import Outside, World
from podclient import wait_until

from virtshim.model.container import Container, ContainerPhase, ExitReason
from virtshim.model.ids import ContainerId
from virtshim.vm.connection import Connection
from virtshim.vm.control import LibvirtControl
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.driver import LibvirtHypervisor
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.pause import LibvirtPausing

URI = "test:///default"
QEMU = "/usr/bin/qemu-system-x86_64"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    connection = Connection(URI)
    profile = NodeProfile("states", DomainType.TEST, QEMU, QEMU, Cgroups.OFF)
    hypervisor = LibvirtHypervisor(connection, profile)
    connection.start()
    assert connection.wait_open(30), connection.trouble()
    outside = Outside()
    outside.vms = cast("Any", hypervisor)
    outside.pausing = LibvirtPausing(connection, profile)
    outside.control = control = LibvirtControl(connection, profile)
    world = World(tmp_path, outside)
    world.pull()
    yield world
    for container in world.records.containers.all():
        world.remove(container.id)
    hypervisor.close()
    control.close()
    connection.close()
    world.close()


@pytest.fixture
def virsh() -> Iterator[Callable[[World, ContainerId], libvirt.virDomain]]:
    """Another connection to the same libvirt."""
    conn = libvirt.open(URI)
    yield lambda world, container: conn.lookupByUUID(world.domain(container).bytes)
    conn.close()


def becomes(world: World, container: ContainerId, wanted: Callable[[Container], bool]) -> Container:
    wait_until(lambda: wanted(world.container(container)), 20, "the event reaches the record")
    return world.container(container)


def is_exited(container: Container) -> bool:
    return container.phase is ContainerPhase.EXITED


def test_a_vm_destroyed_by_virsh_is_reported_as_killed_from_outside(world: World, virsh: Any) -> None:
    _, container = world.running()
    virsh(world, container).destroy()
    ended = becomes(world, container, is_exited).exit
    assert ended is not None
    assert (ended.code, ended.reason) == (137, ExitReason.ERROR)
    assert "externally" in ended.message


def test_a_vm_shut_down_by_virsh_is_completed(world: World, virsh: Any) -> None:
    _, container = world.running()
    virsh(world, container).shutdown()
    ended = becomes(world, container, is_exited).exit
    assert ended is not None
    assert (ended.code, ended.reason) == (0, ExitReason.COMPLETED)


def test_a_paused_vm_counts_as_running_with_a_message(world: World, virsh: Any) -> None:
    _, container = world.running()
    virsh(world, container).suspend()
    paused = becomes(world, container, lambda c: c.status.trouble != "")
    assert paused.phase is ContainerPhase.RUNNING
    assert "externally" in paused.status.trouble
    virsh(world, container).resume()
    becomes(world, container, lambda c: c.status.trouble == "")


def test_reboots_do_not_end_the_container(world: World, virsh: Any) -> None:
    _, container = world.running()
    before = world.container(container)
    for _ in range(3):
        virsh(world, container).reboot(0)
    # Events are in order: after this one, those of the reboots have arrived, too.
    virsh(world, container).suspend()
    becomes(world, container, lambda c: c.status.trouble != "")
    virsh(world, container).resume()
    assert becomes(world, container, lambda c: c.status.trouble == "") == before


def test_a_vm_destroyed_and_undefined_by_virsh_is_exited(world: World, virsh: Any) -> None:
    _, container = world.running()
    vm = virsh(world, container)
    vm.destroy()
    vm.undefine()
    assert becomes(world, container, is_exited).exit is not None
    world.remove(container)
    assert world.records.containers.get(container) is None
