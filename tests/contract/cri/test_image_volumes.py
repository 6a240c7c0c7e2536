"""A pod can mount an image as a volume."""

from typing import Any

import grpc
import pytest
from fakes.cri import Client, refused
from fakes.images import TREE_BYTES
from fakes.world import IMAGE, World

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.cri, pytest.mark.volumes]

Code = grpc.StatusCode
FILES = "registry.test/files:1"


def volume(image: str, path: str = "/data", **changes: Any) -> pb.Mount:
    return pb.Mount(container_path=path, image=pb.ImageSpec(image=image), readonly=True, **changes)


def remove(client: Client, reference: str) -> None:
    client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=reference)))


@pytest.fixture
def files(client: Client, world: World) -> str:
    """The id of an image that has files but no disk."""
    world.outside.files.publish_files(FILES, "etc")
    return client.pull(FILES)


def test_the_status_shows_an_image_volume_with_the_image_id(client: Client, world: World, files: str) -> None:
    made = client.create(client.run(), mounts=[volume(files), volume(FILES, "/etc/more", image_sub_path="etc")])
    client.start(made)
    ((served, *_),) = world.outside.shares.shares.values()
    whole, part = client.status(made).mounts
    assert (whole.image.image, whole.container_path, whole.host_path, whole.readonly) == (files, "/data", "", True)
    assert whole.image.image_ref == files, "what its pull answered"
    assert (part.image.image, part.image_sub_path) == (files, "etc")
    assert served


def test_the_guest_gets_the_files_read_only(client: Client, world: World, files: str) -> None:
    made = client.create(client.run(), mounts=[volume(files, image_sub_path="etc")])
    (record,) = [one for one in world.records.containers.all() if one.id.value == made]
    (shared,) = record.spec.volumes
    (image,) = [one for one in world.records.images.all() if one.id.value == files]
    assert image.tree is not None
    assert shared.host == world.outside.files.path(image.tree, "etc")
    assert (shared.guest, shared.readonly) == ("/data", True)


def test_the_files_stay_while_a_container_uses_them(client: Client, world: World, files: str) -> None:
    trees = world.outside.files.trees
    sandbox = client.run()
    made = client.create(sandbox, mounts=[volume(files)])
    client.start(made)
    remove(client, files)
    assert trees
    client.stop(made)
    assert trees
    client.remove(made)
    assert trees == {}


def test_the_files_of_a_removed_unused_image_are_deleted(client: Client, world: World, files: str) -> None:
    remove(client, files)
    assert world.outside.files.trees == {}


def test_a_failed_creation_holds_no_image_files(client: Client, world: World, files: str) -> None:
    world.outside.shares.gone = True
    with refused(Code.UNAVAILABLE, "share program"):
        client.create(client.run(), mounts=[volume(files)])
    world.outside.shares.gone = False
    remove(client, files)
    assert world.outside.files.trees == {}


def test_an_image_with_a_disk_can_be_a_vm_and_a_volume(client: Client, world: World) -> None:
    world.outside.files.publish_files(FILES, has_disk=True)
    both = client.pull(FILES)
    made = client.create(client.run(), image=pb.ImageSpec(image=both), mounts=[volume(both)])
    remove(client, both)
    assert world.outside.files.trees
    client.remove(made)
    assert world.outside.files.trees == {}
    assert len(world.outside.files.files) == 1, "the other image's disk"


def test_the_size_of_an_image_is_that_of_its_disk_and_files(client: Client, world: World) -> None:
    world.outside.files.publish_files(FILES, has_disk=True)
    both = client.pull(FILES)
    (image,) = [one for one in world.records.images.all() if one.id.value == both]
    (size,) = [one.size for one in client.ListImages(pb.ListImagesRequest()).images if one.id == both]
    assert size == world.outside.files.files[image.digest] + TREE_BYTES


def test_a_container_of_an_image_without_a_disk_is_refused(client: Client, world: World, files: str) -> None:
    before = world.everything()
    with refused(Code.INVALID_ARGUMENT, "is not a VM image: it has no file below /disk.*; build a containerDisk"):
        client.create(client.run(), image=pb.ImageSpec(image=files))
    assert [one for one in world.everything() if "container" in one] == [one for one in before if "container" in one]


@pytest.mark.parametrize(
    ("mount", "code", "says"),
    [
        (
            volume("registry.test/none:1"),
            Code.NOT_FOUND,
            "registry.test/none:1: the image is not on this node; pull it first",
        ),
        (volume(IMAGE), Code.FAILED_PRECONDITION, "has no files here: it is a plain disk"),
        (volume(FILES, image_sub_path="no/such"), Code.NOT_FOUND, "has no directory no/such"),
    ],
)
def test_an_image_that_cannot_be_mounted_is_refused_with_kubelets_error_prefix(
    client: Client, world: World, files: str, mount: pb.Mount, code: grpc.StatusCode, says: str
) -> None:
    with refused(code, rf"^ImageVolumeMountFailed: config.mounts\[/data\]\.image .*{says}"):
        client.create(client.run(), mounts=[mount])
    assert client.containers() == []


def test_a_writable_image_volume_is_refused(client: Client, files: str) -> None:
    mount = volume(files)
    mount.readonly = False
    with refused(Code.INVALID_ARGUMENT, r"mounts\[/data\]\.readonly is false"):
        client.create(client.run(), mounts=[mount])


def test_verbose_status_shows_that_an_image_has_no_disk(client: Client, world: World, files: str) -> None:
    (tree,) = world.outside.files.trees
    facts = client.ImageStatus(pb.ImageStatusRequest(image=pb.ImageSpec(image=files), verbose=True)).info["info"]
    assert '"disk"' not in facts
    assert f'"files": "{tree}"' in facts
