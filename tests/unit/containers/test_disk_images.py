"""A volume that holds a disk's image (disk.img) is a disk of the pod's VM."""

from __future__ import annotations

import pytest
from fakes.waiting import eventually
from fakes.world import World, container_config, pod_key, sandbox_config

from virtshim.devices.guest_view import guest_links_command
from virtshim.devices.values import BlockDevice, CriDevice
from virtshim.model.container import Mount
from virtshim.model.errors import InvalidRequest, NotFound, ShimError, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.vm import OffReason

pytestmark = pytest.mark.volumes

HOST = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pv/mount"
ON_IMAGE = container_config(mounts=(Mount("/data", HOST),))


def run(world: World, pod: str = "web", text: str = "/data") -> SandboxId:
    world.outside.volume_disks.images.setdefault(HOST, "file 8:1 12")
    return world.run(pod, config=sandbox_config(annotations={"virtshim.io/disk-images": text}))


def created(world: World, pod: str = "web") -> ContainerId:
    return world.create(run(world, pod), config=ON_IMAGE)


def test_a_disk_image_is_a_disk_with_a_link_at_its_path_and_is_not_shared(world: World) -> None:
    made = created(world)
    (disk,) = world.outside.vms.spec(world.domain(made)).granted.data_volumes
    assert (disk.host_path, disk.container_path, disk.is_file) == (f"{HOST}/disk.img", "/data", True)
    assert world.outside.seeds.requests[made].blocks == (disk,)
    world.start(made)
    assert world.outside.shares.shares == {}
    eventually(lambda: [done.argv for done in world.outside.guests.commands] == [guest_links_command((disk,))])


def test_a_volume_that_merely_holds_a_disk_image_is_shared(world: World) -> None:
    world.outside.volume_disks.images[HOST] = "file 8:1 12"
    made = world.create(world.run(), config=ON_IMAGE)
    assert [volume.guest for volume in world.container(made).spec.volumes] == ["/data"]
    assert world.container(made).granted.blocks == ()


def test_the_image_files_are_released_before_the_containers_end_is_recorded(world: World) -> None:
    made = created(world)
    world.start(made)
    world.journal.calls.clear()
    world.outside.vms.end(world.domain(made), OffReason.SHUTDOWN)
    world.deliver()
    calls = world.journal.calls
    told = max(at for at, call in enumerate(calls) if call == "records.containers.replace")
    assert calls.index("vms.destroy") < told


@pytest.mark.parametrize("other", [HOST, "/var/lib/kubelet/pods/2/volumes/kubernetes.io~csi/pv/mount"])
def test_a_disk_image_belongs_to_one_vm_at_a_time_under_any_path(world: World, other: str) -> None:
    world.start(created(world))
    world.outside.volume_disks.images[other] = world.outside.volume_disks.images[HOST]
    told = rf"config.mounts\[/data\]: container .* of pod default/web\) has the volume {other}/disk.img"
    with pytest.raises(WrongState, match=told):
        world.create(run(world, "two"), config=container_config(mounts=(Mount("/data", other),)))


def test_several_vms_may_use_a_read_only_disk_image(world: World) -> None:
    for pod in ("one", "two"):
        world.start(
            world.create(run(world, pod), config=container_config(mounts=(Mount("/data", HOST, readonly=True),)))
        )


@pytest.mark.parametrize(
    ("mounts", "kind", "told"),
    [
        ([Mount("/data", "/srv/none")], NotFound, "put a raw disk image there"),
        ([Mount("/data", HOST), Mount("/also", HOST)], InvalidRequest, "is shared at /also, too"),
        ([Mount("/data", HOST), Mount("/data/", HOST)], InvalidRequest, "requested twice"),
        (
            [Mount("/data", f"/var/lib/kubelet/pods/{pod_key('web').uid}/volumes/kubernetes.io~secret/s")],
            InvalidRequest,
            "such a volume cannot hold a disk image",
        ),
    ],
)
def test_an_unusable_disk_image_is_refused_and_the_error_names_the_mount(
    world: World, mounts: list[Mount], kind: type[ShimError], told: str
) -> None:
    with pytest.raises(kind, match=rf"config.mounts\[/data/?\].*: .*{told}"):
        world.create(run(world), config=container_config(mounts=tuple(mounts)))


def test_the_share_program_looks_into_the_volume(world: World) -> None:
    """It has a time limit, and ends what hangs."""
    world.outside.shares.missing.add(HOST)
    with pytest.raises(NotFound, match=f"{HOST} does not exist on the node"):
        created(world)


def test_a_disk_image_and_a_block_volume_cannot_have_one_path(world: World) -> None:
    config = container_config(mounts=ON_IMAGE.mounts, devices=(CriDevice("/dev/block/a", "/data"),))
    with pytest.raises(InvalidRequest, match="requested twice"):
        world.create(run(world), config=config)


def test_an_empty_disk_cannot_be_mounted_inside_a_disk_image(world: World) -> None:
    world.outside.volume_disks.images[HOST] = "file 8:1 12"
    both = {"virtshim.io/disk-images": "/data", "virtshim.io/disks": "a: {size: 1Gi, mountPath: /data}"}
    with pytest.raises(InvalidRequest, match=r"a\.mountPath: /data is in the volume at /data"):
        world.create(world.run(config=sandbox_config(annotations=both)), config=ON_IMAGE)


def test_a_record_distinguishes_files_from_devices(world: World) -> None:
    made = created(world)
    again = world.restarted()
    assert again.container(made).granted.blocks == (BlockDevice(f"{HOST}/disk.img", "/data", is_file=True),)
    again.close()
