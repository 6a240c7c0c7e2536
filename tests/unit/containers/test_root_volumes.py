"""A pod's root disk can be a block volume (volumeDevices with devicePath /)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.journal import Crash, When
from fakes.world import IMAGE, World, container_config, sandbox_config

from virtshim.devices.values import CriDevice
from virtshim.model.errors import InternalError, InvalidRequest, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import Disk
from virtshim.volumes.root_volume import Content, header

pytestmark = pytest.mark.volumes

PV = "/dev/block/pv"
ON_PV = container_config(devices=(CriDevice(PV, "/"),))
STEPS = ["root_volumes.begin", "root_volumes.copy", "root_volumes.seal"]
REPLACE = {"virtshim.io/root-disk-on-image-change": "replace"}


def root_of(world: World, container: ContainerId) -> Disk:
    return world.outside.vms.spec(world.domain(container)).disks[0]


def content(world: World) -> Content:
    return world.outside.root_volumes.look(PV).content


def written(world: World) -> list[str]:
    return [call for call in world.journal.calls if call.startswith("root_volumes.") and call in STEPS]


def test_a_vm_boots_from_the_volume_and_has_no_other_root_disk(world: World) -> None:
    made = world.create(world.run(), config=ON_PV)
    disk = root_of(world, made)
    assert (disk.path, disk.is_device, disk.serial) == (PV, True, "root")
    assert written(world) == STEPS
    assert "root.qcow2" not in world.outside.disks.directories[made]
    assert content(world) is Content.ROOT_DISK
    found = world.records.containers.get(made)
    assert found is not None
    assert world.do.node.container_facts(found)["rootDisk"] == PV


def test_a_later_pod_boots_from_what_is_on_the_volume(world: World) -> None:
    first = world.run()
    world.create(first, config=ON_PV)
    world.remove_sandbox(first)
    assert content(world) is Content.ROOT_DISK, "volumes outlive pods"
    world.journal.calls.clear()
    second = world.create(world.run("other"), config=ON_PV)
    assert written(world) == []
    assert root_of(world, second).path == PV


def test_the_cloud_init_instance_stays_the_same_until_the_volume_is_overwritten(world: World) -> None:
    kept = world.outside.seeds.requests
    made = [world.create(world.run(pod), config=ON_PV) for pod in ("first", "second")]
    assert kept[made[0]].kept_disk == kept[made[1]].kept_disk == made[0].short
    world.outside.root_volumes.devices[PV] = b"somebody's data".ljust(512, b"!")
    anew = world.create(world.run("third", config=sandbox_config(annotations=REPLACE)), config=ON_PV)
    assert kept[anew].kept_disk == anew.short


def test_a_root_volume_written_by_virtlet_is_reused(world: World) -> None:
    world.pull()
    image = world.images.find(IMAGE)
    assert image is not None
    world.outside.root_volumes.devices[PV] = header(image.digest, ContainerId("f" * 64))[:42].ljust(512, b"\0")
    made = world.create(world.run(), config=ON_PV)
    assert written(world) == []
    assert world.outside.seeds.requests[made].kept_disk == image.digest.hex[:20]


def test_an_image_change_is_refused_unless_the_pod_asks_for_it(world: World) -> None:
    world.create(world.run(), config=ON_PV)
    world.outside.files.publish("registry.test/vm/other:2", b"other disk")
    world.pull("registry.test/vm/other:2")
    changed = container_config(devices=ON_PV.devices, image="registry.test/vm/other:2")
    with pytest.raises(WrongState, match="on-image-change: replace"):
        world.create(world.run("two"), config=changed)
    old = world.outside.root_volumes.look(PV).image
    world.create(world.run("three", config=sandbox_config(annotations=REPLACE)), config=changed)
    assert world.outside.root_volumes.look(PV).image not in (None, old)


def test_a_volume_that_is_too_small_is_refused_before_anything_is_written(world: World) -> None:
    world.outside.root_volumes.size = 512
    with pytest.raises(InvalidRequest, match="use a larger volume"):
        world.create(world.run(), config=ON_PV)
    assert written(world) == []


def test_a_copy_that_fails_leaves_no_root_disk_and_is_repeated(world: World) -> None:
    sandbox = world.run()
    world.journal.fail("root_volumes.copy", InternalError("I/O error"))
    with pytest.raises(InternalError, match="I/O error"):
        world.create(sandbox, config=ON_PV)
    assert content(world) is Content.HALF
    world.create(sandbox, config=ON_PV)
    assert content(world) is Content.ROOT_DISK


def steps_to(directory: Path, step: str) -> int:
    """How many calls CreateContainer makes until then, that one included."""
    (directory / "count").mkdir()
    world = World(directory / "count")
    world.pull()
    sandbox = world.run()
    world.journal.calls.clear()
    world.create(sandbox, config=ON_PV)
    world.close()
    return world.journal.calls.index(step) + 1


@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_leaves_no_valid_header_and_a_repeated_call_completes_the_copy(
    world: World, step: str, when: When, tmp_path: Path
) -> None:
    sandbox = world.run()
    world.journal.crash(steps_to(tmp_path, step), when)
    with pytest.raises(Crash):
        world.create(sandbox, config=ON_PV)
    is_whole = step == STEPS[-1] and when is When.AFTER
    assert (content(world) is Content.ROOT_DISK) == is_whole
    after = world.recovered()
    made = after.create(sandbox, config=ON_PV)
    assert content(after) is Content.ROOT_DISK
    assert root_of(after, made).path == PV
    after.close()


@pytest.mark.parametrize(
    ("device", "annotations", "told"),
    [
        (CriDevice(PV, "/", "r"), {}, "take readOnly from the volume"),
        (CriDevice(PV, "//"), {"virtshim.io/root-disk": "pod"}, "remove the annotation"),
    ],
)
def test_an_unusable_root_volume_is_refused_with_the_remedy(
    world: World, device: CriDevice, annotations: dict[str, str], told: str
) -> None:
    sandbox = world.run(config=sandbox_config(annotations=annotations))
    with pytest.raises(InvalidRequest, match=told):
        world.create(sandbox, config=container_config(devices=(device,)))


def test_the_annotation_takes_two_values(world: World) -> None:
    wrong = sandbox_config(annotations={"virtshim.io/root-disk-on-image-change": "maybe"})
    with pytest.raises(InvalidRequest, match="neither refuse nor replace"):
        world.run(config=wrong)


def test_two_vms_never_run_on_one_volume(world: World) -> None:
    first = world.create(world.run(), config=ON_PV)
    beside = world.create(world.run("two"), config=ON_PV)
    world.start(first)
    with pytest.raises(
        WrongState, match=rf"container_path /\]: container {first} \(vm of pod .*/web\) has the volume {PV}"
    ):
        world.create(world.run("three"), config=ON_PV)
    with pytest.raises(WrongState, match=f"container {first} .* has the volume"):
        world.start(beside)


@pytest.mark.parametrize(("place", "host"), [("/.", "/dev/block/other"), ("/dev/data", PV)])
def test_a_vm_has_one_root_disk_and_a_volume_is_used_once(world: World, place: str, host: str) -> None:
    devices = (*ON_PV.devices, CriDevice(host, place))
    with pytest.raises(InvalidRequest, match="two root disks, or one volume twice"):
        world.create(world.run(), config=container_config(devices=devices))


def test_a_volume_that_a_vm_has_as_a_data_disk_is_not_booted_from(world: World) -> None:
    data = world.create(world.run(), config=container_config(devices=(CriDevice(PV, "/dev/data"),)))
    world.start(data)
    with pytest.raises(WrongState, match=f"{data} .* has the volume"):
        world.create(world.run("two"), config=ON_PV)


def test_other_volumes_stay_disks_beside_it(world: World) -> None:
    config = container_config(devices=(CriDevice("/dev/block/data", "/dev/data"), CriDevice(PV, "/")))
    made = world.create(world.run(), config=config)
    granted = world.outside.vms.spec(world.domain(made)).granted
    assert [block.container_path for block in granted.data_volumes] == ["/dev/data"]


def test_without_a_root_volume_the_container_has_its_own_root_disk(world: World) -> None:
    made = world.create(world.run(), config=container_config(image=IMAGE))
    assert not root_of(world, made).is_device
    assert written(world) == []
