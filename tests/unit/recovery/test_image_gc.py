"""When the file system fills up, unused images are removed, the longest unused first; needed images stay."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from fakes.world import World, container_config, sandbox_config
from structlog.testing import capture_logs

from virtshim.config.images import Images
from virtshim.config.settings import Settings
from virtshim.metrics import observed
from virtshim.model.container import Mount
from virtshim.model.errors import InternalError
from virtshim.model.image import Image, ImageConfig

A, B, C = (f"registry.test/vm/{name}:1" for name in "abc")
MINUTE = 60.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Of its 1000 bytes 800 are used."""
    return full_node(World(tmp_path, images=Images(gc_high_percent=80, gc_low_percent=60)))


def full_node(world: World, others: int = 500) -> World:
    """With three images of 100 bytes, an hour old, A the oldest."""
    files = world.outside.files
    files.capacity, files.others = 1000, others
    for name in (A, B, C):
        files.publish(name, name.encode().ljust(100))
        world.pull(name)
        world.outside.clock.advance(MINUTE)
    world.outside.clock.advance(60 * MINUTE)
    return world


def look(world: World) -> None:
    world.app.recovery.reconcile.look()


def names(world: World) -> set[str]:
    return {tag for image in world.images.all() for tag in image.tags}


def test_below_the_high_mark_everything_stays(world: World) -> None:
    world.outside.files.others -= 20
    look(world)
    assert names(world) == {A, B, C}


def test_above_the_high_mark_the_longest_unused_images_go_until_the_low_mark(world: World) -> None:
    with capture_logs() as logs:
        look(world)
    assert names(world) == {C}
    assert world.outside.files.filesystem_usage().space.used_percent <= 60
    (told,) = [one for one in logs if one["event"] == "image_gc.removed"]
    assert (told["images"], told["bytes"], told["used_percent"]) == (2, 200, 80)
    look(world)
    assert names(world) == {C}


def test_by_default_nothing_is_removed_however_full_it_is(tmp_path: Path) -> None:
    world = full_node(World(tmp_path), others=700)
    look(world)
    assert names(world) == {A, B, C}


def test_a_reload_changes_the_marks(world: World) -> None:
    off = Settings(paths=world.settings.paths, images=Images(gc_high_percent=100))
    world.app.live.use(off)
    look(world)
    assert names(world) == {A, B, C}
    world.app.live.use(world.settings)
    look(world)
    assert names(world) == {C}


def test_an_ended_containers_image_stays(world: World) -> None:
    container = world.create(world.run(), config=container_config(image=A))
    look(world)
    assert names(world) == {A}
    world.start(container)
    world.stop(container)
    world.outside.files.others = 900
    world.outside.clock.advance(10 * MINUTE)
    look(world)
    assert names(world) == {A}
    world.remove(container)
    world.outside.clock.advance(10 * MINUTE)
    look(world)
    assert names(world) == set()


def test_an_image_with_the_disk_of_a_container_stays(world: World) -> None:
    """Its removal would free nothing."""
    world.outside.files.publish(B, A.encode().ljust(100), config=ImageConfig(user="other"))
    world.pull(B)
    world.create(world.run(), config=container_config(image=A))
    world.outside.files.others = 900
    world.outside.clock.advance(10 * MINUTE)
    look(world)
    assert names(world) == {A, B}


def test_pinned_images_stay(tmp_path: Path) -> None:
    world = full_node(World(tmp_path, images=Images(gc_high_percent=80, gc_low_percent=60, pinned=(A,))))
    look(world)
    assert names(world) == {A}


def test_the_image_below_a_pods_disk_and_the_files_of_a_volume_stay(world: World) -> None:
    world.outside.files.publish_files(C, has_disk=False)
    world.pull(C)
    volume = Mount("/models", "", readonly=True, image=C)
    sandbox = world.run(config=sandbox_config(annotations={"virtshim.io/root-disk": "pod"}))
    container = world.create(sandbox, config=container_config(image=A, mounts=(volume,)))
    world.outside.files.others = 900
    world.outside.clock.advance(10 * MINUTE)
    look(world)
    assert names(world) == {A, C}
    world.remove(container)
    world.outside.clock.advance(10 * MINUTE)
    look(world)
    assert names(world) == {A}
    world.remove_sandbox(sandbox)
    world.outside.clock.advance(10 * MINUTE)
    look(world)
    assert names(world) == set()


def test_an_image_that_was_just_pulled_stays_for_the_pod_that_it_was_pulled_for(world: World) -> None:
    world.pull(A)
    look(world)
    assert names(world) == {A}


def test_an_image_that_was_just_used_stays_and_goes_after_those_that_were_not(world: World) -> None:
    container = world.create(world.run(), config=container_config(image=A))
    world.outside.files.others = 0
    look(world)
    world.remove(container)
    world.outside.files.others = 500
    look(world)
    assert names(world) == {A}
    world.outside.files.others = 800
    world.outside.clock.advance(10 * MINUTE)
    look(world)
    assert names(world) == set()


def test_an_image_whose_name_is_being_pulled_stays(world: World) -> None:
    gate = world.journal.hold("files.fetch")
    pull = threading.Thread(target=world.pull, args=(A,))
    pull.start()
    try:
        gate.wait()
        look(world)
        assert names(world) == {A}
    finally:
        gate.open()
        pull.join()
    assert names(world) == {A}


def test_a_pull_may_begin_while_the_images_in_use_are_listed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    find, pulls = world.images.find, contextlib.ExitStack()

    def begin_pull(name: str) -> None:
        gate = world.journal.hold("files.fetch")
        pull = threading.Thread(target=world.pull, args=(name,))
        pulls.callback(pull.join)
        pulls.callback(gate.open)
        pull.start()
        gate.wait()

    def find_while_another_begins(reference: str) -> Image | None:
        if B not in world.images.pulling():
            begin_pull(B)
        return find(reference)

    with pulls:
        begin_pull(A)
        monkeypatch.setattr(world.images, "find", find_while_another_begins)
        look(world)
        assert names(world) == {A, B}


def test_no_image_is_removed_while_a_record_is_unreadable(world: World) -> None:
    world.records.containers.unreadable["f" * 64] = "it is no container"
    look(world)
    assert names(world) == {A, B, C}


def test_too_little_space_is_logged_once_and_so_is_its_end(world: World) -> None:
    files = world.outside.files
    files.others = 900
    with capture_logs() as logs:
        look(world)
        look(world)
        files.others = 100
        look(world)
    told = [one["event"] for one in logs if one["event"].startswith("image_gc.") and one["event"] != "image_gc.removed"]
    assert told == ["image_gc.not_enough", "image_gc.enough"]


def test_deleting_a_file_is_retried(world: World) -> None:
    world.journal.fail("files.delete", InternalError("the disk is broken"))
    with pytest.raises(InternalError):
        look(world)
    look(world)
    assert world.outside.files.filesystem_usage().space.used_percent <= 60


def test_removed_images_are_counted(world: World) -> None:
    told: list[observed.Fact] = []

    class Listener:
        def __getattr__(self, name: str) -> object:
            return told.append if name == "tell" else lambda *_: None

    with observed.measured_by(Listener()):  # type: ignore[arg-type]
        look(world)
    assert observed.ImagesRemoved(2) in told


@pytest.mark.parametrize(("high", "low"), [(70, 80), (80, 80)])
def test_a_low_mark_must_be_below_the_high_mark(high: int, low: int) -> None:
    with pytest.raises(ValueError, match=r"must be below gc_high_percent \(.*\); lower it"):
        Images(gc_high_percent=high, gc_low_percent=low)
