"""Empty disks beside the root disk are made with the container and removed with it."""

from __future__ import annotations

import pytest
from fakes.waiting import eventually
from fakes.world import World, container_config, sandbox_config

from virtshim.devices.values import CriDevice
from virtshim.model.errors import InternalError, InvalidRequest, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason
from virtshim.volumes.empty_disks import command, parse

pytestmark = pytest.mark.volumes

TEXT = "scratch: {size: 1Gi, mountPath: /data}\nplain: {size: 1Gi, format: raw}"
DISKS = parse(TEXT)
WITH_DISKS = sandbox_config(annotations={"virtshim.io/disks": TEXT})


def serials(world: World, container: ContainerId) -> list[str]:
    return [disk.serial for disk in world.outside.vms.spec(world.domain(container)).disks]


def test_the_vm_has_empty_disks_after_the_root_disk_and_the_seed(world: World) -> None:
    made = world.create(world.run(config=WITH_DISKS))
    assert serials(world, made) == ["root", "seed", "plain", "scratch"]


def test_empty_disks_are_mounted_by_cloud_init_and_by_the_agent(world: World) -> None:
    made = world.create(world.run(config=WITH_DISKS))
    assert world.outside.seeds.requests[made].empty_disks == DISKS
    world.start(made)
    eventually(lambda: [run.argv for run in world.outside.guests.commands] == [command(DISKS)])


@pytest.mark.parametrize("kept", [{}, {"virtshim.io/root-disk": "pod"}])
def test_the_space_of_empty_disks_is_freed_when_the_container_has_ended(world: World, kept: dict[str, str]) -> None:
    made = world.create(world.run(config=sandbox_config(annotations={"virtshim.io/disks": TEXT, **kept})))
    world.start(made)
    names = world.outside.disks.directories[made]
    assert {"disk-scratch", "disk-plain"} <= names
    world.outside.vms.end(world.domain(made), OffReason.SHUTDOWN)
    world.outside.vms.deliver()
    assert not [name for name in names if name.startswith(("disk-", "root"))]


def test_a_failure_to_create_an_empty_disk_fails_the_call_and_leaves_nothing(world: World) -> None:
    sandbox = world.run(config=WITH_DISKS)
    world.journal.fail("empty_disks.create", InternalError("no room"))
    with pytest.raises(InternalError, match="no room"):
        world.create(sandbox)
    assert world.outside.disks.directories == {}
    world.create(sandbox)


def test_the_node_limits_the_size_of_each_empty_disk(world: World) -> None:
    world.close()
    limited = World(world.directory, world.outside, vm={"max_root_volume": "512MiB"})
    with pytest.raises(InvalidRequest, match=r"virtshim.io/disks: plain.size: .* more than this node allows"):
        limited.create(limited.run(config=WITH_DISKS))


def test_a_path_that_another_volume_of_the_pod_has_is_refused(world: World) -> None:
    config = container_config(devices=(CriDevice("/dev/block/a", "/plain"),))
    with pytest.raises(InvalidRequest, match="plain: a block volume of the pod is called plain"):
        world.create(world.run(config=WITH_DISKS), config=config)


def test_a_vm_with_empty_disks_cannot_be_checkpointed(world: World) -> None:
    made = world.create(world.run(config=WITH_DISKS))
    world.start(made)
    with pytest.raises(WrongState, match="has disks beside its root disk"):
        world.do.checkpoint_container.checkpoint(world.container(made), "/var/x.tar", world.deadline())
