"""The files of an image reserve their space while they are unpacked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.layers import entry, layer, said

from virtshim.images.downloads.places import Ground, Landing, Partials
from virtshim.images.downloads.room import Room, Share, Turns
from virtshim.images.trees.writer import TreeWriter
from virtshim.model.errors import ResourceExhausted


@pytest.fixture
def landings(tmp_path: Path) -> Iterator[list[Landing]]:
    """Of two pulls that are under way at once."""
    ground = Ground(tmp_path, Partials(tmp_path / "partial"), Turns(), Room(), lambda _: None)
    with contextlib.ExitStack() as held:
        yield [held.enter_context(Landing(ground, name, 1 << 20)) for name in ("one", "two")]


@pytest.fixture
def pulls(landings: list[Landing]) -> list[TreeWriter]:
    """Their files."""
    return [landing.tree() for landing in landings]


def test_two_trees_written_at_once_do_not_reserve_the_same_space(
    pulls: list[TreeWriter], free: Callable[[int], None]
) -> None:
    one, two = pulls
    free(1000)
    one.tell(said("f", "root/a", "600"))
    with pytest.raises(ResourceExhausted, match="'two' does not fit on this node's image file system; free some space"):
        two.tell(said("f", "root/a", "600"))
    # What is written is no longer free, and no longer promised.
    one.write(b"1" * 600)
    free(400)
    two.tell(said("f", "root/b", "400"))


def test_space_is_reserved_for_the_unpacked_size_of_data_still_to_come(
    pulls: list[TreeWriter], free: Callable[[int], None]
) -> None:
    one, two = pulls
    free(1000)
    one.expect(600)
    with pytest.raises(ResourceExhausted, match="'two' does not fit"):
        two.expect(401)
    one.came(300)
    two.expect(700)
    with pytest.raises(ResourceExhausted, match="'one' does not fit"):
        one.tell(said("f", "root/a", "301"))


def test_a_pull_that_needs_no_space_succeeds_when_others_have_used_their_reservation(
    pulls: list[TreeWriter], free: Callable[[int], None]
) -> None:
    one, two = pulls
    free(1000)
    one.expect(600)
    free(500)
    two.expect(0)
    for name in ("data.img", "empty"):
        two.tell(said("f", f"root/{name}", "0"))


@pytest.mark.parametrize("why", ["", "it holds evil"])
def test_files_that_are_cancelled_or_refused_reserve_no_space(
    tmp_path: Path, free: Callable[[int], None], why: str
) -> None:
    free(1000)
    room = Room()
    with TreeWriter(tmp_path / "other", "other", 1 << 20, Share(room)) as other:
        with TreeWriter(tmp_path / "ended", "ended", 1 << 20, Share(room)) as ended:
            ended.expect(900)
            ended.tell(said("f", "root/a", "900"))
            if why:
                ended.refuse(why)
                other.expect(1000)
        other.expect(1000)


def test_a_pulls_disk_and_files_come_from_the_same_bytes(landings: list[Landing], free: Callable[[int], None]) -> None:
    free(1000)
    one, two = landings
    tree, disk, other = one.tree(), one.disk(), two.tree()
    tree.expect(800)
    disk.expect(900)
    disk.write(b"QFI\xfb")
    other.expect(1000 - (900 - 4))
    with pytest.raises(ResourceExhausted):
        other.expect(1000 - (900 - 5))


def test_a_raw_disk_among_the_files_needs_space_only_for_its_data(
    writer: TreeWriter, free: Callable[[int], None]
) -> None:
    free(1000)
    writer.tell(said("f", "root/data.img", str(1 << 20)))
    writer.write(bytes(1 << 20))
    assert not writer.refused


def test_files_beyond_the_nodes_limit_are_refused_for_that_reason_at_any_free_space(
    writer: TreeWriter, free: Callable[[int], None]
) -> None:
    """A VM of that image is fine all the same."""
    free(1000)
    writer.tell(said("f", "root/a", str(2 << 20)))
    assert "images.max_bytes" in writer.refused


def test_an_image_that_will_not_fit_is_refused_before_its_layers_are_fetched(
    push, pull, web, free: Callable[[int], None]
) -> None:
    name = push(layer(*(entry(f"f{n}", os.urandom(1000)) for n in range(100))))
    free(90_000)
    with pytest.raises(ResourceExhausted, match="does not fit on this node's image file system; free some space"):
        pull(name)
    assert sum("/blobs/" in path for path, *_ in web.seen) == 1, "its config alone"
    free(1 << 30)
    assert pull(name).size == 100_000


def test_an_image_that_just_fits_reserves_no_more_than_its_remaining_size(
    push, pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = TreeWriter.write
    monkeypatch.setattr(TreeWriter, "write", lambda tree, data: (written.append(len(data)), write(tree, data)))
    monkeypatch.setattr("virtshim.images.trees.writer.free_bytes", lambda _: 320_000 - sum(written))
    assert pull(push(layer(*(entry(f"f{n}", os.urandom(10_000)) for n in range(30))))).size == 300_000


def test_a_file_that_will_not_fit_unpacked_is_refused_before_it_is_written(
    push, pull, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = TreeWriter.write
    monkeypatch.setattr(TreeWriter, "write", lambda tree, data: (written.append(len(data)), write(tree, data)))
    free(100_000)
    with pytest.raises(ResourceExhausted, match="does not fit"):
        pull(push(layer(entry("small", b"1"), entry("large", b"packs well" * 50_000))))
    assert written == [1]
