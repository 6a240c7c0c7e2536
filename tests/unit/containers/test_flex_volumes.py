"""A pod of Virtlet's with flexVolumes gets empty disks."""

from __future__ import annotations

import pytest
from fakes.waiting import eventually
from fakes.world import World, container_config, pod_key, sandbox_config

from virtshim.model.container import ContainerConfig, Mount
from virtshim.model.errors import InvalidRequest, NotFound, WrongState
from virtshim.volumes.empty_disks import command

pytestmark = pytest.mark.volumes

HOST = f"/var/lib/kubelet/pods/{pod_key('web').uid}/volumes/virtlet~flexvolume_driver/scratch"


def with_flex_volume(world: World, options: bytes = b'{"type": "qcow2", "capacity": "1GiB"}') -> ContainerConfig:
    world.outside.volume_disks.options[HOST] = options
    return container_config(mounts=(Mount("/data", HOST),))


def test_a_flex_volume_is_an_empty_disk_mounted_at_its_path(world: World) -> None:
    made = world.create(world.run(), config=with_flex_volume(world))
    (disk,) = world.container(made).spec.empty_disks
    assert [found.serial for found in world.outside.vms.spec(world.domain(made)).disks] == ["root", "seed", "scratch"]
    assert world.outside.seeds.requests[made].empty_disks == (disk,)
    world.start(made)
    eventually(lambda: [run.argv for run in world.outside.guests.commands] == [command((disk,))])
    assert world.outside.shares.shares == {}
    with pytest.raises(WrongState, match=r"beside its root disk \(config.mounts\[/data\]\)"):
        world.do.checkpoint_container.checkpoint(world.container(made), "/var/x.tar", world.deadline())


def test_a_flex_volume_whose_driver_left_nothing_is_refused(world: World) -> None:
    sandbox = world.run()
    with pytest.raises(NotFound, match=r"virtlet-flexvolume.json is not there"):
        world.create(sandbox, config=container_config(mounts=(Mount("/data", HOST),)))
    world.create(sandbox, config=with_flex_volume(world))


def test_the_nodes_size_limit_and_the_pods_other_disks_apply_to_flex_volumes(world: World) -> None:
    config = with_flex_volume(world)
    same_name = sandbox_config(annotations={"virtshim.io/disks": "scratch: {size: 1Gi}"})
    with pytest.raises(InvalidRequest, match="disk 'scratch' is requested twice"):
        world.create(world.run(config=same_name), config=config)
    world.close()
    limited = World(world.directory, world.outside, vm={"max_root_volume": "512MiB"})
    with pytest.raises(InvalidRequest, match=r"config.mounts\[/data\]: .* more than this node allows"):
        limited.create(limited.run("web", attempt=1), config=config)
