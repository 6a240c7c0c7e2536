"""A volume shows the files of an image, merged from its layers and confined to their directory."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd
from fakes.clock import FakeClock
from fakes.layers import entry, folder, layer, link, same_gzip, symlink
from fakes.waiting import eventually

from virtshim.images.confined import frames
from virtshim.images.confined.contents import ImageTree
from virtshim.images.confined.layer_tar import EntryKind, TarEntry
from virtshim.images.service import ImageService
from virtshim.model.errors import InvalidRequest, NotFound, ResourceExhausted
from virtshim.store.copies import ImageNoteFiles
from virtshim.store.records import SqliteRecords

ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="AREA images NOT TESTED: owners are root's to give")
BY_ROOT = 0o7777
RAW_DISK = b"\xeb\x3c" + os.urandom((2 << 20) - 2)


def seen(root: Path) -> dict[str, str]:
    """All below it: a file's text, a link's target behind an arrow, a directory as a slash."""
    found = {}
    for above, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(above, name)
            kind = path.lstat().st_mode
            text = f"-> {path.readlink()}" if stat.S_ISLNK(kind) else "/" if stat.S_ISDIR(kind) else path.read_text()
            found[str(path.relative_to(root))] = text
    return found


# -- what is in an image -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(same_gzip, id="gzip"),
        pytest.param(zstd.compress, id="zstd"),
        pytest.param(bytes, id="plain"),
    ],
)
def test_an_ordinary_image_is_kept_as_files(push, pull, store, pack: Callable[[bytes], bytes]) -> None:
    found = pull(push(layer(folder("etc"), entry("etc/motd", b"hello"), symlink("bin", "usr/bin")), pack=pack))
    assert found.tree == found.digest, "it is no VM's image"
    assert found.virtual_size == 0
    assert found.size == len(b"hello")
    assert store.stored() == {found.tree}
    assert seen(Path(store.path(found.tree, ""))) == {"etc": "/", "etc/motd": "hello", "bin": "-> usr/bin"}


def test_an_image_with_a_disk_has_its_files_and_the_disk_once(push, pull, store, qcow2: bytes) -> None:
    found = pull(push(layer(entry("etc/motd", b"hello"), entry("disk/vm.qcow2", qcow2))))
    root = Path(store.path(found.tree, ""))
    assert found.digest != found.tree
    assert (root / "disk/vm.qcow2").samefile(store.path(found.digest))
    assert (root / "etc/motd").read_text() == "hello"
    assert found.size == len(qcow2)


LAYERS: dict[str, tuple[list[bytes], dict[str, str]]] = {
    "replaced above": ([layer(entry("a", b"old")), layer(entry("a", b"new"))], {"a": "new"}),
    "a directory of several layers": (
        [layer(entry("d/a", b"1")), layer(entry("d/b", b"2"))],
        {"d": "/", "d/a": "1", "d/b": "2"},
    ),
    "whited out": ([layer(entry("d/a", b"1"), entry("d/b", b"2")), layer(entry("d/.wh.a"))], {"d": "/", "d/b": "2"}),
    "a directory whited out": ([layer(entry("d/e/a", b"1"), entry("x", b"2")), layer(entry(".wh.d"))], {"x": "2"}),
    "whited out and made anew": (
        [layer(entry("d/a", b"1")), layer(entry(".wh.d"), entry("d/b", b"2"))],
        {"d": "/", "d/b": "2"},
    ),
    "opaque, said last": (
        [layer(entry("d/a", b"1")), layer(entry("d/b", b"2"), entry("d/.wh..wh..opq"))],
        {"d": "/", "d/b": "2"},
    ),
    "opaque, and what is below it": (
        [layer(entry("d/e/a", b"1")), layer(entry("d/e/c", b"3")), layer(entry("d/.wh..wh..opq"))],
        {},
    ),
    "a whiteout does not act in its own layer": ([layer(entry(".wh.a"), entry("a", b"1"))], {"a": "1"}),
    "a directory over a link": (
        [layer(symlink("lib", "/etc")), layer(entry("lib/a", b"1"))],
        {"lib": "/", "lib/a": "1"},
    ),
    "a link over a directory": ([layer(entry("lib/a", b"1")), layer(symlink("lib", "/etc"))], {"lib": "-> /etc"}),
    "a file over a directory": ([layer(entry("lib/a", b"1")), layer(entry("lib", b"f"))], {"lib": "f"}),
    "a directory over a file": (
        [layer(entry("d/below", b"0")), layer(entry("d", b"f")), layer(entry("d/a", b"1"))],
        {"d": "/", "d/a": "1"},
    ),
    "twice in one layer": ([layer(entry("a", b"old"), entry("a", b"new"))], {"a": "new"}),
    "names from the top": ([layer(entry("/a", b"1"), entry("./b", b"2"), entry("c//d", b"3"))],
                           {"a": "1", "b": "2", "c": "/", "c/d": "3"}),
    "what aufs leaves": ([layer(entry(".wh..wh.plnk/1"), entry(".wh..wh.aufs"), entry("a", b"1"))], {"a": "1"}),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_layers_are_merged_as_by_other_runtimes(unpacked, case: str) -> None:
    layers, expected = LAYERS[case]
    # Somewhere is a file: an image of nothing is none.
    found = seen(unpacked(layer(entry("zz", b"!")), *layers))
    assert found.pop("zz") == "!"
    assert found == expected


def test_hard_links_are_one_file(unpacked) -> None:
    root = unpacked(layer(entry("a", b"1"), link("b", "a"), link("d/c", "/b")))
    assert (root / "a").samefile(root / "b")
    assert (root / "a").samefile(root / "d/c")
    assert (root / "a").stat().st_nlink == 3


LINKS: dict[str, tuple[list[bytes], dict[str, str]]] = {
    "to a file that a layer above replaces": (
        [layer(entry("a", b"old"), link("b", "a"), link("c", "b")), layer(entry("a", b"new"))],
        {"a": "new", "b": "old", "c": "old"},
    ),
    "to a file that a layer above removes": ([layer(entry("a", b"1"), link("b", "a")), layer(entry(".wh.a"))], {"b": "1"}),
    "hidden, to a file that is seen": ([layer(entry("a", b"1"), link("b", "a")), layer(entry(".wh.b"))], {"a": "1"}),
    "to a file of a layer below": ([layer(entry("a", b"1")), layer(link("b", "a"))], {"a": "1", "b": "1"}),
    "to a file of a layer below that is hidden": (
        [layer(entry("a", b"old")), layer(link("b", "a"), link("c", "b")), layer(entry("a", b"new"))],
        {"a": "new", "b": "old", "c": "old"},
    ),
    "before its file": ([layer(link("b", "a"), entry("a", b"1"))], {"a": "1", "b": "1"}),
    "to a symbolic link": ([layer(symlink("a", "x"), link("b", "a"))], {"a": "-> x", "b": "-> x"}),
}  # fmt: skip


@pytest.mark.parametrize("case", LINKS)
def test_a_hard_link_has_the_content_that_its_own_layer_saw(unpacked, case: str) -> None:
    layers, expected = LINKS[case]
    assert seen(unpacked(*layers)) == expected


@ROOT_ALONE
def test_owners_modes_and_times_are_kept(unpacked) -> None:
    long = "n" * 120
    root = unpacked(
        layer(
            folder("./", mode=0o750, uid=7),
            folder("d", mode=0o1777, uid=1, gid=2, mtime=1_000_000_000),
            entry("d/f", b"x", mode=0o640, uid=1000, gid=100, mtime=1_100_000_000.5),
            entry(f"d/{long}", mode=0o400, uid=4_000_000_000, gid=5),
            symlink("d/s", long * 2),
        ),
        layer(entry("d/g", b"y")),
    )
    said = {name: (root / name).lstat() for name in ("", "d", "d/f", f"d/{long}")}
    assert [(one.st_mode & BY_ROOT, one.st_uid, one.st_gid) for one in said.values()] == [
        (0o750, 7, 0), (0o1777, 1, 2), (0o640, 1000, 100), (0o400, 4_000_000_000, 5),
    ]  # fmt: skip
    assert (said["d"].st_mtime, said["d/f"].st_mtime) == (1_000_000_000, 1_100_000_000)
    assert os.readlink(root / "d/s") == long * 2


def test_a_name_may_have_any_bytes(unpacked) -> None:
    name = "\udcff\udcfe café"
    root = unpacked(layer(entry(name, b"1"), form=tarfile.GNU_FORMAT))
    assert os.listdir(os.fsencode(root)) == [name.encode(errors="surrogateescape")]


def test_files_that_upper_layers_replace_or_remove_are_not_counted(push, pull, store) -> None:
    below = layer(entry("a", b"old" * 1000), entry("b", b"gone"), entry("c", b"kept"), link("d", "c"))
    found = pull(push(below, layer(entry("a", b"new"), entry(".wh.b"), entry(".wh.c"))))
    assert found.size == len(b"new" + b"kept")
    assert seen(Path(store.path(found.tree, ""))) == {"a": "new", "d": "kept"}


def test_hidden_files_are_removed_at_the_end_of_their_layer() -> None:
    told: list[list[str]] = []
    tree = ImageTree(lambda _, payload: told.append(frames.parse_names(payload)))
    for name in ("a", "b"):
        tree.take(TarEntry(name, EntryKind.FILE), iter(()))
    tree.layer_done()
    for name in ("a", "b"):
        tree.take(TarEntry(name, EntryKind.FILE), iter(()))
    tree.layer_done()
    tree.layer_done()
    assert [(kind, path) for kind, path, *_ in told[2:]] == [
        ("f", "aside/0"), ("f", "aside/1"), ("u", "aside/0"), ("u", "aside/1"),
    ]  # fmt: skip


def test_a_hard_link_to_the_disk_may_appear_twice(push, pull, store, qcow2: bytes) -> None:
    found = pull(push(layer(entry("disk/vm", qcow2), link("a", "disk/vm"), link("a", "disk/vm"), link("b", "a"))))
    root = Path(store.path(found.tree, ""))
    assert [(root / name).samefile(store.path(found.digest)) for name in ("disk/vm", "a", "b")] == [True] * 3


def test_files_may_be_as_deep_as_can_be_counted_and_removed(push, pull, store, incoming) -> None:
    found = pull(push(layer(entry("d/" * 255 + "f", b"1"))))
    assert store.path(found.tree, "d/" * 255).endswith("/d")
    store.delete(found.tree)
    eventually(lambda: incoming() == [])
    assert store.filesystem_usage().inodes_used


def test_zeros_take_no_room(push, pull, store) -> None:
    found = pull(push(layer(entry("a", bytes(16 << 20)))))
    file = (Path(store.path(found.tree, "")) / "a").stat()
    assert file.st_size == 16 << 20
    assert file.st_blocks * 512 < 1 << 20


# -- what is not -------------------------------------------------------------------------------------------------------


def test_set_user_id_bits_devices_and_attributes_do_not_reach_the_node(unpacked, store) -> None:
    root = unpacked(
        layer(
            entry("su", b"#!", mode=0o6755, pax_headers={"SCHILY.xattr.user.x": "1"}),
            folder("team", mode=0o2775),
            entry("disk0", kind=tarfile.BLKTYPE, devmajor=8),
            entry("null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
            entry("pipe", kind=tarfile.FIFOTYPE),
        )
    )
    assert sorted(os.listdir(root)) == ["su", "team"]
    assert (root / "su").stat().st_mode & BY_ROOT == 0o755
    assert (root / "team").stat().st_mode & BY_ROOT == 0o775
    assert os.listxattr(root / "su") == []
    assert root.parents[1].stat().st_mode & BY_ROOT == 0o700, "nobody runs what is in there"


HOSTILE: dict[str, tuple[list[bytes], str]] = {
    "a name that leads up": ([layer(entry("../evil", b"1"))], "holds the name '../evil', which contains '..'"),
    "a name that leads up in the middle": ([layer(entry("a/../../evil", b"1"))], "which contains '..'"),
    "a whiteout of what is above": ([layer(entry("a", b"1"), entry(".wh..."))], r"a whiteout of '\.\.' in"),
    "a whiteout of itself": ([layer(entry("a", b"1"), entry("a/.wh..", b""))], r"a whiteout of '\.' in '/a'"),
    "a whiteout of nothing": ([layer(entry("a", b"1"), entry(".wh."))], "a whiteout of '' in"),
    "a hard link that leads up": ([layer(entry("a", b"1"), link("b", "../../../etc/shadow"))], "which contains '..'"),
    "a hard link out": ([layer(entry("a", b"1"), link("b", "/etc/shadow"))], "a hard link to 'etc/shadow', which is not one of"),
    "a hard link to a directory": ([layer(entry("d/a", b"1"), link("b", "d"))], "a hard link to 'd', which is not one of"),
    "a hard link to itself": ([layer(entry("a", b"1"), link("b", "b"))], "a hard link to 'b', which is not one of"),
    "links in a circle": ([layer(entry("a", b"1"), link("b", "c"), link("c", "b"))], "a hard link to '[bc]', which is"),
    "a file behind a link": ([layer(symlink("a", "/etc"), entry("a/passwd", b"1"))], "'a/passwd' below 'a', which is"),
    "a directory behind a link": ([layer(symlink("a", "/etc"), folder("a/x"))], "'a/x' below 'a', which is not a directory"),
    "a link behind a link": ([layer(symlink("a", "/etc"), symlink("a/x", "y"))], "'a/x' below 'a', which is not a directory"),
    "a hard link behind a link": ([layer(entry("f", b"1"), symlink("a", "/etc"), link("a/x", "f"))], "which is not a directory"),
    "a root that is a link": ([layer(symlink("./", "/etc"), entry("passwd", b"1"))], "its root is not a directory"),
    "a name that is too long": ([layer(entry("n" * 256, b"1"))], "a name that is too long"),
    "directories that are too deep": ([layer(entry("d/" * 256 + "f", b"1"))], "directories nested more than 256 deep"),
    "a path that is too long": ([layer(entry("n/" * 2010 + "n", b"1"))], "a name that is too long"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_and_leave_nothing(push, pull, store, tmp_path: Path, case: str) -> None:
    layers, why = HOSTILE[case]
    with pytest.raises(InvalidRequest, match=f"no file below /disk.*; it cannot be a volume either: .*{why}"):
        pull(push(*layers))
    assert store.stored() == frozenset()
    assert not list((tmp_path / "images").rglob("evil"))


def test_a_vm_image_with_files_that_no_volume_can_have_still_works_for_a_vm(push, pull, store, qcow2: bytes) -> None:
    found = pull(push(layer(entry("disk/vm", qcow2), entry("../evil", b"1"))))
    assert found.tree is None
    assert store.stored() == {found.digest}
    assert pull(push(layer(entry("disk/vm", qcow2), entry("../evil", b"1")))) == found


def test_more_files_or_bytes_than_the_node_allows_are_refused(push, make_store, incoming) -> None:
    store = make_store(max_bytes=1 << 20)
    with pytest.raises(InvalidRequest, match=r"larger than 1048576 bytes.*images\.max_bytes"):
        store.fetch(push(*(layer(entry(f"f{n}", os.urandom(700_000))) for n in range(2))), None, threading.Event())
    assert (store.stored(), incoming()) == (frozenset(), [])


def test_too_many_entries_are_refused_in_bounded_memory() -> None:
    told: list[bytes] = []
    tree = ImageTree(lambda kind, _: told.append(kind), most_entries=1000)
    for n in range(1100):
        tree.take(TarEntry(f"f{n}", EntryKind.FILE), iter(()))
    assert "more than" in tree.refused
    assert (told.count(frames.ENTRY), told.count(frames.NO_TREE)) == (1000, 1)


def test_a_lack_of_space_for_files_is_reported_as_such(push, pull, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("virtshim.images.trees.writer.os.symlink", full)
    with pytest.raises(ResourceExhausted, match="does not fit"):
        pull(push(layer(entry("a", b"1"), symlink("b", "a"))))


# -- their life --------------------------------------------------------------------------------------------------------


def test_a_directory_of_an_image_is_found_and_nothing_outside_of_it(push, pull, store, tmp_path: Path) -> None:
    name = push(
        layer(
            entry("srv/www/index", b"1"), symlink("latest", "srv/www"), symlink("abs", "/srv"), symlink("out", "../../../.."),
            symlink("etc", str(tmp_path)), symlink("loop", "loop"),
        )
    )  # fmt: skip
    tree = pull(name).tree
    root = store.path(tree, "")
    assert store.path(tree, "srv/www") == store.path(tree, "latest") == f"{root}/srv/www"
    assert store.path(tree, "abs/www") == f"{root}/srv/www"
    assert store.path(tree, "out") == root
    for missing in ("srv/ww", "srv/www/index", "etc", "loop", "n" * 300):
        with pytest.raises(NotFound, match="it has no directory"):
            store.path(tree, missing)


def test_a_directory_whose_name_is_not_utf_8_is_refused_as_such(push, pull, store) -> None:
    """It would be in records, and said to the program that serves it."""
    name = "\udcff\udcfe"
    odd = layer(
        entry(f"srv/{name}/deep/a", b"1"), symlink("latest", f"srv/{name}"), folder("etc"), form=tarfile.GNU_FORMAT
    )
    tree = pull(push(odd)).tree
    for below in ("latest", "latest/deep"):
        with pytest.raises(
            InvalidRequest, match=rf"{below} leads to srv/.*udcff.*, whose name is not UTF-8; name another"
        ):
            store.path(tree, below)
    assert store.path(tree, "latest/../../etc").endswith("/root/etc")


# openat2 fails as under systemd's RestrictSUIDSGID, which cannot check a mode in memory.
WITHOUT_OPENAT2 = """
import sys
from pathlib import Path
from virtshim.model.ids import ImageDigest
from virtshim.images.trees.store import Trees
from vmwrapper.confine import kernel, seccomp
kernel.forbid_new_privileges()
seccomp.install(seccomp.program([], {}, absent=[437]))
print(Trees(Path(sys.argv[1]), Path(sys.argv[1])).path(ImageDigest(sys.argv[2]), sys.argv[3]))
"""


def test_a_directory_is_found_without_openat2_which_the_unit_may_forbid(push, pull, store, tmp_path: Path) -> None:
    tree = pull(push(layer(entry("srv/www/index", b"1"), symlink("latest", "/srv/x/../www"), folder("srv/x")))).tree
    command = [sys.executable, "-c", WITHOUT_OPENAT2, str(tmp_path / "images" / "trees"), str(tree), "latest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (f"{store.path(tree, '')}/srv/www", "")


def test_a_known_image_is_not_unpacked_again_and_a_removed_one_is(push, pull, store, web) -> None:
    name = push(layer(entry("a", b"1")))
    first = pull(name)
    asked = len(web.seen)
    assert pull(name) == first
    assert sum("/blobs/" in path for path, *_ in web.seen[asked:]) == 1, "its config alone"
    store.delete(first.tree)
    assert store.stored() == frozenset()
    with pytest.raises(NotFound, match="pull it again"):
        store.path(first.tree, "")
    assert pull(name) == first


def test_files_removed_while_the_disk_was_still_needed_are_unpacked_again(push, pull, store, qcow2: bytes) -> None:
    name = push(layer(entry("etc/motd", b"hello"), entry("disk/vm", qcow2)))
    first = pull(name)
    store.delete(first.tree)
    assert store.stored() == {first.digest}
    assert pull(name) == first
    assert (Path(store.path(first.tree, "")) / "disk/vm").samefile(store.path(first.digest))


def test_after_a_lost_database_images_with_files_are_known_again(push, store, qcow2: bytes, tmp_path: Path) -> None:
    notes = ImageNoteFiles(str(tmp_path / "notes"))
    names = (push(layer(entry("a", b"1")), name="files"), push(layer(entry("disk/vm", qcow2)), name="both"))
    records = SqliteRecords(str(tmp_path / "state.db"))
    images = ImageService(records, store, notes, FakeClock())
    before = [images.pull(name, None, threading.Event()) for name in names]
    assert [image.has_disk for image in before] == [False, True]
    records.close()
    records = SqliteRecords(str(tmp_path / "new.db"))
    images = ImageService(records, store, notes, FakeClock())
    images.adopt()
    images.collect_all()
    assert [images.find(name) for name in names] == before
    for image in before:
        images.remove(image.id.value)
    assert store.stored() == frozenset()
    records.close()


def test_half_unpacked_files_are_gone_after_a_start(store, tmp_path: Path) -> None:
    half = tmp_path / "images" / "incoming" / "half"
    (half / "root" / "etc").mkdir(parents=True)
    (half / "root" / "etc" / "motd").write_text("hel")
    (half / "root" / "etc").chmod(0o500)
    store.sweep()
    assert not half.exists()


def test_use_counts_what_was_unpacked(push, pull, store) -> None:
    before = store.filesystem_usage()
    found = pull(push(layer(*(entry(f"f{n}", os.urandom(10_000)) for n in range(20)))))
    after = store.filesystem_usage()
    assert after.used_bytes - before.used_bytes >= 200_000
    assert after.inodes_used - before.inodes_used >= 20
    store.delete(found.tree)
    eventually(lambda: store.filesystem_usage().inodes_used <= before.inodes_used)


def test_removing_an_image_frees_its_reported_size(push, store, incoming, tmp_path: Path) -> None:
    """kubelet removes images until the sizes that it was told are enough."""
    kernel = os.urandom(300_000)
    files = [entry(f"etc/f{n}", os.urandom(5000)) for n in range(40)]
    name = push(
        layer(entry("disk/vm.img", RAW_DISK), entry("boot/vmlinuz", kernel), *files, entry("holes", bytes(8 << 20)))
    )
    with contextlib.closing(SqliteRecords(str(tmp_path / "state.db"))) as records:
        images = ImageService(records, store, ImageNoteFiles(str(tmp_path / "notes")), FakeClock())
        taken = images.pull(name, None, threading.Event()).taken
        before = store.filesystem_usage().used_bytes
        images.remove(name)
        eventually(lambda: incoming() == [])
        freed = before - store.filesystem_usage().used_bytes
    assert len(RAW_DISK) + 2 * len(kernel) + 40 * 5000 <= taken < 2 * len(RAW_DISK), "the disk once"
    assert 0 <= freed - taken <= 16 << 10, "but for notes of a few bytes"


def test_a_disk_that_only_a_volume_still_uses_is_counted(push, pull, store, incoming) -> None:
    found = pull(push(layer(entry("disk/vm.img", RAW_DISK), entry("a", b"1"))))
    both = store.filesystem_usage()
    store.delete(found.digest)
    assert both.used_bytes - store.filesystem_usage().used_bytes < len(RAW_DISK)
    store.delete(found.tree)
    eventually(lambda: incoming() == [])
    assert both.used_bytes - store.filesystem_usage().used_bytes >= len(RAW_DISK)


def test_files_unpacked_by_an_earlier_version_are_counted_by_their_content(push, pull, store, tmp_path: Path) -> None:
    found = pull(push(layer(entry("a", os.urandom(100_000)))))
    (tmp_path / "images" / "trees" / found.tree.hex / "use").write_text("100000 4\n")
    assert store.filesystem_usage(found.tree).used_bytes == 100_000
    assert pull(push(layer(entry("a", b"1")))).size == 1
