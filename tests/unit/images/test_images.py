"""Images are pulled, named and removed, and files that are needed stay."""

import dataclasses
import hashlib
import itertools
import threading
from pathlib import Path

import pytest
from fakes.images import Published
from fakes.world import IMAGE, World, container_config

from virtshim.config.images import Images
from virtshim.config.settings import Settings
from virtshim.model.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    ResourceExhausted,
)
from virtshim.model.ids import ImageDigest, ImageId
from virtshim.model.image import Image, ImageConfig

OTHER = "registry.test/vm/other:2"


def test_a_pulled_image_is_listed_with_tag_digest_and_size(world: World) -> None:
    (image,) = world.images.all()
    assert image.tags == (IMAGE,)
    assert image.repo_digests == (f"registry.test/vm/guest@{image.digest}",)
    assert (image.size, image.virtual_size) == (6, 48)


def test_a_cancelled_pull_adds_no_image(world: World) -> None:
    world.outside.files.publish(OTHER, b"big disk")
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(DeadlineExceeded):
        world.images.pull(OTHER, None, cancelled)
    assert world.images.find(OTHER) is None


def test_the_same_content_under_two_names_is_one_image(world: World) -> None:
    assert world.pull(OTHER, b"a disk") == world.pull(IMAGE)
    (image,) = world.images.all()
    assert image.tags == (IMAGE, OTHER)


OURS = ImageConfig(user="app", entrypoint=("/bin/ours",), stop_signal="SIGQUIT")
THEIRS = ImageConfig(entrypoint=("/bin/evil",))


def two_of_one_disk(world: World) -> tuple[Image, Image]:
    """Ours under IMAGE, theirs under OTHER, and nothing else."""
    world.images.remove(IMAGE)
    for name, config in ((IMAGE, OURS), (OTHER, THEIRS)):
        world.outside.files.publish(name, b"a disk", config=config)
        world.pull(name)
    ours, theirs = world.images.find(IMAGE), world.images.find(OTHER)
    assert ours is not None
    assert theirs is not None
    return ours, theirs


def test_two_images_of_one_disk_have_different_ids_and_share_the_disk(world: World) -> None:
    ours, theirs = two_of_one_disk(world)
    assert ours.id != theirs.id
    assert ours.digest == theirs.digest
    assert (ours.size, theirs.size) == (6, 6)
    assert set(world.outside.files.files) == {ours.digest}
    assert world.images.files.filesystem_usage().used_bytes == 6


def test_an_image_looked_up_by_any_reference_has_its_own_config(world: World) -> None:
    for image, config, name in zip(two_of_one_disk(world), (OURS, THEIRS), (IMAGE, OTHER), strict=True):
        for reference in (image.id.value, image.id.hex, image.id.hex[:12], name, *image.repo_digests):
            found = world.images.find(reference)
            assert found == image, reference
            assert found.config == config, reference


def test_removal_by_id_takes_that_image_and_leaves_the_disk_to_the_other(world: World) -> None:
    ours, theirs = two_of_one_disk(world)
    world.images.remove(ours.id.value)
    assert world.images.all() == [theirs]
    assert world.images.find(IMAGE) is None
    assert set(world.outside.files.files) == {theirs.digest}
    world.images.remove(theirs.id.value)
    assert world.outside.files.files == {}


def test_a_container_created_by_image_id_gets_that_images_config(world: World) -> None:
    ours, _ = two_of_one_disk(world)
    made = world.container(world.create(world.run(), config=container_config(image=ours.id.value)))
    assert made.spec.image_config == OURS
    assert made.spec.command == ("/bin/ours",)
    assert (made.image_id, made.image) == (ours.id, ours.digest)


def test_a_name_has_the_config_of_its_last_pull(world: World) -> None:
    for signal in ("SIGINT", "SIGQUIT"):
        world.outside.files.publish(IMAGE, b"a disk", config=ImageConfig(stop_signal=signal))
        world.pull(IMAGE)
    found = world.images.find(IMAGE)
    assert found is not None
    assert found.config.stop_signal == "SIGQUIT"
    former = [image.config.stop_signal for image in world.images.all() if not image.tags]
    assert former == ["", "SIGINT"]


def test_a_plain_file_equal_to_an_images_config_does_not_become_that_image(world: World) -> None:
    ours, theirs = two_of_one_disk(world)
    published = world.outside.files.published["web.test/config.json:latest"] = Published(b"a disk", said=OURS)
    assert ImageId(published.digest.value) == ours.id
    with pytest.raises(InvalidRequest, match="is the configuration of an image"):
        world.pull("web.test/config.json:latest")
    assert world.images.all() == [ours, theirs]


def test_an_image_takes_its_id_over_from_a_plain_file_equal_to_its_config(world: World) -> None:
    world.images.remove(IMAGE)
    published = world.outside.files.published["web.test/config.json:latest"] = Published(b"a disk", said=OURS)
    world.pull("web.test/config.json:latest")
    ours, _ = two_of_one_disk(world)
    assert ours.id.value == published.digest.value
    assert ours.tags == (IMAGE,)
    assert set(world.outside.files.files) == {ours.digest}


def test_an_image_of_an_earlier_version_is_removed_when_its_names_are_pulled_again(world: World) -> None:
    """It was known by its disk."""
    ours, theirs = two_of_one_disk(world)
    former = dataclasses.replace(ours, id=ImageId(ours.digest.value))
    world.records.images.delete(ours.id)
    world.records.images.put(former)
    container = world.create(world.run(), config=container_config(image=former.id.value))
    world.pull(IMAGE)
    assert {image.id for image in world.images.all()} == {ours.id, theirs.id}
    assert world.container(container).image_id == former.id
    for image in (ours, theirs):
        world.images.remove(image.id.value)
    assert set(world.outside.files.files) == {ours.digest}


def test_a_moved_tag_names_the_new_content_only(world: World) -> None:
    old = world.pull()
    world.outside.files.publish(IMAGE, b"a newer disk")
    new = world.pull()
    found = world.images.find(IMAGE)
    assert found is not None
    assert found.digest == new != old
    (former,) = [image for image in world.images.all() if image.digest == old]
    assert former.tags == ()
    assert former.repo_digests


def test_a_tag_moves_in_every_spelling(world: World) -> None:
    old = world.pull("docker.io/library/debian:12", b"old disk")
    new = world.pull("debian:12", b"new disk")
    assert {image.digest: image.tags for image in world.images.all() if image.digest in (old, new)} == {
        old: (),
        new: ("debian:12",),
    }


def test_one_name_in_two_spellings_is_listed_once(world: World) -> None:
    digest = world.pull("docker.io/library/debian", b"disk")
    assert world.pull("debian", b"disk") == digest
    image = world.images.find(digest.value)
    assert image is not None
    assert image.tags == ("debian:latest",)
    assert image.repo_digests == (f"debian@{digest}",)
    assert world.images.find("index.docker.io/library/debian:latest") == image


def test_an_absent_image_is_not_found_and_a_malformed_name_is_an_error(world: World) -> None:
    assert world.images.find("registry.test/none") is None
    with pytest.raises(InvalidRequest):
        world.images.find("registry.test/UPPER case")


def test_removal_by_any_reference_takes_record_and_file(world: World) -> None:
    world.pull(OTHER, b"a disk")
    world.images.remove(IMAGE)
    assert world.images.all() == []
    assert world.outside.files.files == {}


def test_removing_an_absent_image_is_no_error(world: World) -> None:
    world.images.remove("registry.test/none")
    world.images.remove(f"sha256:{'0' * 64}")


def test_the_file_stays_while_a_container_needs_it(world: World) -> None:
    container = world.create(world.run())
    world.images.remove(IMAGE)
    assert world.images.all() == []
    assert len(world.outside.files.files) == 1
    world.remove(container)
    assert world.outside.files.files == {}


def test_an_image_pulled_again_while_only_a_container_held_it_is_listed_again(world: World) -> None:
    container = world.create(world.run())
    world.images.remove(IMAGE)
    world.pull()
    world.remove(container)
    assert len(world.outside.files.files) == 1


def test_a_removal_between_download_and_record_starts_the_pull_over(world: World) -> None:
    gate = world.journal.hold("files.stored")
    thread = threading.Thread(target=world.pull, args=(OTHER, b"other disk"))
    thread.start()
    gate.wait()
    digest = world.outside.files.published[OTHER].digest
    world.outside.files.delete(digest)
    gate.open()
    thread.join()
    assert world.journal.count("files.fetch") == 2
    assert world.images.find(OTHER) is not None
    assert digest in world.outside.files.files


def test_a_file_removed_during_the_request_to_its_source_is_downloaded_again(world: World) -> None:
    world.journal.fail("files.fetch", Aborted("it was removed while it was pulled"))
    world.pull()
    assert world.journal.count("files.fetch") == 2


def test_a_pull_that_always_loses_against_removals_gives_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.outside.files, "stored", frozenset)
    with pytest.raises(Aborted, match="pull it again"):
        world.pull()


def test_a_pinned_image_cannot_be_removed_meanwhile(world: World) -> None:
    removed = threading.Event()

    def remove() -> None:
        world.images.remove(IMAGE)
        removed.set()

    with world.images.pinned(IMAGE):
        thread = threading.Thread(target=remove)
        thread.start()
        assert not removed.wait(0.05)
    thread.join()
    assert world.images.all() == []


def test_a_record_that_cannot_be_written_fails_the_pull(world: World) -> None:
    world.journal.fail("records.images.put", ResourceExhausted("disk full"))
    with pytest.raises(ResourceExhausted):
        world.pull(OTHER, b"other disk")
    assert world.images.find(OTHER) is None


def test_start_up_drops_records_without_a_file_and_unneeded_files(world: World) -> None:
    (kept,) = world.images.all()
    lost = world.pull(OTHER, b"other disk")
    world.outside.files.delete(lost)
    stray = ImageDigest(f"sha256:{'5' * 64}")
    world.outside.files.files[stray] = 7
    world.outside.files.unfinished.add("half a download")
    world.images.collect_all()
    assert world.images.all() == [kept]
    assert set(world.outside.files.files) == {kept.digest}
    assert world.outside.files.unfinished == set()


def test_start_up_keeps_the_file_that_only_a_container_needs(world: World) -> None:
    world.create(world.run())
    world.images.remove(IMAGE)
    world.images.collect_all()
    assert len(world.outside.files.files) == 1


def test_the_use_of_the_file_system_is_that_of_the_store(world: World) -> None:
    assert world.images.files.filesystem_usage().used_bytes == 6


def test_images_that_the_operator_names_are_listed_as_pinned(tmp_path: Path) -> None:
    """By any of their names; kubelet then keeps them. A reload is enough."""
    world = World(tmp_path, images=Images(pinned=("registry.test/vm/b", "registry.test/vm/not-here")))
    try:
        for name in ("a", "b"):
            world.outside.files.publish(f"registry.test/vm/{name}", name.encode())
            world.pull(f"registry.test/vm/{name}", name.encode())

        def pinned() -> list[tuple[str, ...]]:
            return [image.tags for image in world.images.all() if image.pinned]

        assert pinned() == [("registry.test/vm/b:latest",)]
        found = world.images.find("registry.test/vm/b:latest")
        assert found is not None
        assert found.pinned
        digest = found.repo_digests[0]
        world.app.live.use(Settings(images=Images(pinned=())))
        assert pinned() == []
        world.app.live.use(Settings(images=Images(pinned=(digest,))))
        assert pinned() == [("registry.test/vm/b:latest",)]
        world.images.remove("registry.test/vm/b")
        assert pinned() == []
    finally:
        world.close()


def test_a_pinned_name_of_hex_digits_is_not_the_beginning_of_an_id(tmp_path: Path) -> None:
    """Nor do images that it happens to begin, several or one, go from the list."""
    world, seen = World(tmp_path), dict[str, bytes]()
    contents = (b"%d" % number for number in itertools.count())
    second = next(one for one in contents if seen.setdefault(hashlib.sha256(one).hexdigest()[:4], one) != one)
    word = hashlib.sha256(second).hexdigest()[:4]
    try:
        for content in (seen[word], second):
            world.outside.files.publish(f"registry.test/vm/{content.decode()}", content)
            world.pull(f"registry.test/vm/{content.decode()}", content)
        found = world.images.all()
        ids = [image.id.hex for image in found]
        assert [one[:4] for one in ids] == [word, word]
        for name in (word, ids[0][:12]):
            world.app.live.use(Settings(images=Images(pinned=(name,))))
            assert world.images.all() == found
            assert world.images.find(found[0].tags[0]) == found[0]
    finally:
        world.close()


def test_the_space_of_an_earlier_versions_images_is_counted_at_start(world: World) -> None:
    (image,) = world.images.all()
    assert image.taken == image.size
    world.records.images.put(dataclasses.replace(image, taken=0))
    world.images.collect_all()
    assert world.images.all() == [image]


def test_an_invalid_pinned_name_is_reported_at_start() -> None:
    with pytest.raises(ValueError, match="pinned"):
        Images(pinned=("Not A Name",))
