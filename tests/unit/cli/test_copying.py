"""`virtshim cp` writes only harmless files from a guest's archive, which may be hostile."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtshim.cli.copying import Place, parse_place, unpack
from virtshim.images.confined.layer_tar import BadTar

pytestmark = [pytest.mark.operator, pytest.mark.hostile]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    place = tmp_path / "here"
    place.mkdir()
    return place


def entry(name: str, kind: bytes = tarfile.REGTYPE, mode: int = 0o644, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.mode, made.linkname = kind, mode, target
    return made


def archive(*entries: tarfile.TarInfo, content: bytes = b"content") -> Iterator[bytes]:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for one in entries:
            one.size = len(content) if one.isreg() else 0
            tar.addfile(one, io.BytesIO(content))
    return iter([written.getvalue()])


def unpacked(place: Path, *entries: tarfile.TarInfo, new: str = "new") -> list[str]:
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return list(unpack(archive(*entries), descriptor, new))
    finally:
        os.close(descriptor)


def test_the_top_gets_its_new_name_and_modes_without_special_bits(here: Path) -> None:
    made = (
        entry("old", tarfile.DIRTYPE, 0o2750),
        entry("old/empty", tarfile.DIRTYPE, 0o500),
        entry("old/script", mode=0o4755),
    )
    assert unpacked(here, *made) == []
    found = {str(path.relative_to(here)): path.stat().st_mode & 0o7777 for path in here.rglob("*")}
    assert found == {"new": 0o750, "new/empty": 0o500, "new/script": 0o755}
    assert (here / "new/script").read_bytes() == b"content"


@pytest.mark.parametrize("name", ["../out", "/etc/out", "old/../../out", ".."])
def test_no_name_leads_out_of_the_target(here: Path, name: str) -> None:
    with pytest.raises(BadTar, match="was not requested"):
        unpacked(here, entry(name))
    assert [path.name for path in here.parent.rglob("*")] == ["here"]


def test_links_and_devices_are_left_out_and_named(here: Path) -> None:
    odd = (
        entry("old/link", tarfile.SYMTYPE, target="/etc"),
        entry("old/hard", tarfile.LNKTYPE, target="old/file"),
        entry("old/pipe", tarfile.FIFOTYPE),
    )
    assert unpacked(here, entry("old", tarfile.DIRTYPE), *odd) == [one.name for one in odd]
    assert os.listdir(here / "new") == []


@pytest.mark.parametrize("name", ["old/link/file", "old/link"])
def test_a_link_in_the_target_is_not_followed(here: Path, name: str) -> None:
    outside = here.parent / "outside"
    outside.mkdir()
    (here / "new").mkdir()
    (here / "new/link").symlink_to(outside if name.endswith("file") else outside / "file")
    with pytest.raises(OSError, match=r"link|directory"):
        unpacked(here, entry(name))
    assert os.listdir(outside) == []


def test_a_pipe_in_the_target_is_not_written_to(here: Path) -> None:
    os.mkfifo(here / "new")
    with pytest.raises(OSError, match=r"No such device|no file"):
        unpacked(here, entry("old"))


def test_an_existing_directory_keeps_its_mode(here: Path) -> None:
    (here / "new").mkdir(mode=0o711)
    unpacked(here, entry("old", tarfile.DIRTYPE, 0o777), entry("old/file"))
    assert (here / "new").stat().st_mode & 0o777 == 0o711


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("web:/etc/hosts", Place("web", "/etc/hosts")),
        ("default/web:x", Place("default/web", "x")),
        ("./a:b", Place("", "./a:b")),
        ("/a:b", Place("", "/a:b")),
        ("plain", Place("", "plain")),
    ],
)
def test_a_place_is_in_a_vm_or_here(word: str, place: Place) -> None:
    assert parse_place(word) == place
