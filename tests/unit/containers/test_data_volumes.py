"""A block volume beside the root disk belongs to one VM at a time."""

from __future__ import annotations

import pytest
from fakes.world import World, container_config

from virtshim.devices.values import BlockDevice, CriDevice, GrantedDevices, volume_of_both
from virtshim.model.container import ContainerConfig
from virtshim.model.errors import WrongState

pytestmark = pytest.mark.volumes

PV = "/dev/block/pv"


def with_volume(permissions: str = "rw") -> ContainerConfig:
    return container_config(devices=(CriDevice(PV, "/dev/data", permissions),))


@pytest.mark.parametrize("others", ["r", "rw"])
def test_a_running_vms_volume_is_refused_and_the_error_names_its_pod_and_container(world: World, others: str) -> None:
    first = world.create(world.run(), config=with_volume())
    world.start(first)
    told = rf"container_path /dev/data\]: container {first} \(vm of pod default/web\) has the volume {PV}"
    with pytest.raises(WrongState, match=told):
        world.create(world.run("two"), config=with_volume(others))


def test_a_second_container_with_the_same_volume_starts_only_after_the_first_stopped(world: World) -> None:
    first = world.create(world.run(), config=with_volume())
    world.start(world.create(world.run("two"), config=with_volume()))
    with pytest.raises(WrongState, match=r"of pod default/two\) has the volume"):
        world.start(first)


def test_a_volume_is_free_when_its_vm_has_ended(world: World) -> None:
    first = world.create(world.run(), config=with_volume())
    world.start(first)
    world.stop(first)
    world.start(world.create(world.run("two"), config=with_volume()))


def test_any_number_of_vms_may_read_a_volume(world: World) -> None:
    for pod in ("one", "two"):
        world.start(world.create(world.run(pod), config=with_volume("r")))


def test_a_volume_is_known_by_any_of_its_names() -> None:
    one = BlockDevice("/dev/sdb", "/data", identity="8:16")
    other = BlockDevice("/dev/disk-x", "/", identity="8:16")
    unknown = BlockDevice("/dev/sdc", "/data")
    assert volume_of_both(GrantedDevices(blocks=(unknown, one)), GrantedDevices(blocks=(other,))) == one
    assert volume_of_both(GrantedDevices(blocks=(unknown,)), GrantedDevices(blocks=(one, other))) is None
    assert volume_of_both(GrantedDevices(blocks=(unknown,)), GrantedDevices(blocks=(unknown,))) == unknown
