"""A guest whose root disk outlives its containers always finds its machine type and its devices in the same places."""

from __future__ import annotations

import pytest
from fakes.world import World, container_config, sandbox_config

from virtshim.devices.values import CriDevice
from virtshim.model.container import ContainerConfig
from virtshim.model.ids import ContainerId
from virtshim.model.vm import DeviceNumbers, OffReason, VmSpec

pytestmark = pytest.mark.volumes

KEEP = sandbox_config(annotations={"virtshim.io/root-disk": "pod"})
ROOT = CriDevice("/dev/block/pv", "/")


def with_volumes(*names: str, root: bool = False) -> ContainerConfig:
    volumes = tuple(CriDevice(f"/dev/block/{name}", f"/dev/{name}") for name in names)
    return container_config(devices=((ROOT,) if root else ()) + volumes)


def spec_of(world: World, container: ContainerId) -> VmSpec:
    return world.outside.vms.spec(world.domain(container))


def ended(world: World, container: ContainerId) -> ContainerId:
    world.start(container)
    world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
    world.outside.vms.deliver()
    return container


def test_libvirt_chooses_device_places_for_a_disk_that_is_not_kept(world: World) -> None:
    spec = spec_of(world, world.create(world.run()))
    assert (spec.machine, spec.numbers) == ("", DeviceNumbers())


def test_a_volume_added_later_moves_no_other_volume(world: World) -> None:
    sandbox = world.run(config=KEEP)
    first = spec_of(world, ended(world, world.create(sandbox, config=with_volumes("a", "c"))))
    again = spec_of(world, world.create(sandbox, attempt=1, config=with_volumes("a", "b", "c")))
    assert first.numbers == DeviceNumbers((0, 1), (2, 3), (0,))
    assert again.numbers == DeviceNumbers((0, 1), (2, 4, 3), (0,))


@pytest.mark.parametrize("root", [False, True], ids=["the pod's", "on a volume"])
def test_a_kept_disk_keeps_its_machine_type_after_a_qemu_upgrade(world: World, root: bool) -> None:
    sandbox = world.run(config=None if root else KEEP)
    first = spec_of(world, ended(world, world.create(sandbox, config=with_volumes(root=root))))
    world.outside.vms.machine_type = "pc-q35-9.1"
    again = spec_of(world, world.create(sandbox, attempt=1, config=with_volumes(root=root)))
    assert (first.machine, again.machine) == ("pc-q35-7.2", "pc-q35-7.2")
    other = spec_of(world, world.create(world.run("other", config=KEEP)))
    assert other.machine == "pc-q35-9.1"


def test_a_root_volume_keeps_its_device_places_in_another_pod(world: World) -> None:
    first = world.run()
    ended(world, world.create(first, config=with_volumes("a", root=True)))
    world.remove_sandbox(first)
    spec = spec_of(world, world.create(world.run("other"), config=with_volumes("b", "a", root=True)))
    assert spec.numbers.blocks == (3, 2)


def test_device_places_are_removed_with_the_pods_disk(world: World) -> None:
    sandbox = world.run(config=KEEP)
    ended(world, world.create(sandbox))
    assert world.outside.disks.notes
    world.remove_sandbox(sandbox)
    assert world.outside.disks.notes == {}
