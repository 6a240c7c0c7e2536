"""The writer of files trusts nothing that the process which reads the layers reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.layers import said

from virtshim.images.confined import frames
from virtshim.images.trees.writer import TreeWriter
from virtshim.model.errors import InternalError


def test_a_file_larger_than_the_node_allows_is_refused_before_it_is_written(writer: TreeWriter) -> None:
    writer.tell(said("f", "root/a", str(1 << 20)))
    writer.write(bytes(1 << 20))
    writer.tell(said("f", "root/b", "1"))
    assert "images.max_bytes" in writer.refused


@pytest.mark.parametrize("name", ["root/x/evil", "root/d/../x/evil", "root/up/evil"])
def test_nothing_is_written_behind_a_link_or_above_the_root(writer: TreeWriter, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    for one in (said("l", "root/x", str(tmp_path / "outside")), said("d", "root/d"), said("l", "root/up", "..")):
        writer.tell(one)
    if ".." in name:
        with pytest.raises(InternalError, match="invalid data"):
            writer.tell(said("f", name, "1"))
    else:
        writer.tell(said("f", name, "1"))
        assert "cannot be made" in writer.refused
        writer.write(b"1")
    assert not list(tmp_path.rglob("evil"))


def test_a_link_that_takes_a_directorys_place_meanwhile_is_not_followed(writer: TreeWriter, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    writer.tell(said("l", "root/d", str(outside)))
    writer.tell(said("d", "root/d"))
    assert writer.refused
    assert outside.stat().st_mode & 0o777 == 0o700
    assert list(outside.iterdir()) == []


def test_an_existing_file_is_not_written_to(writer: TreeWriter, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    writer.tell(said("l", "root/x", str(secret)))
    writer.tell(said("f", "root/x", "4"))
    writer.write(b"evil")
    assert secret.read_text() == "hunter2"
    assert writer.refused


def test_a_hard_link_names_the_link_and_not_what_it_leads_to(writer: TreeWriter, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    writer.tell(said("l", "root/x", str(secret)))
    writer.tell(said("h", "root/y", "root/x"))
    assert (tmp_path / "tree/root/y").is_symlink()
    assert secret.stat().st_nlink == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        b"", b"f", said("q", "root/a"), said("f", "a", "1"), said("f", "root/../a", "1"), said("f", "root//a", "1"),
        said("f", "/root/a", "1"), said("f", "aside", "1"), said("f", "use", "1"), said("f", "root/a", "-"),
        frames.names("d", "root/a", "-1", "0", "0", "0", ""), frames.names("d", "root/a", "0", str(1 << 32), "0", "0", ""),
        frames.names("d", "root/a", "0", "0", "0", str(1 << 70), ""), said("h", "root/a", "/etc/shadow"),
    ],
)  # fmt: skip
def test_a_malformed_message_from_the_reader_is_an_internal_error(writer: TreeWriter, nonsense: bytes) -> None:
    with pytest.raises(InternalError, match="invalid data"):
        writer.tell(nonsense)


def test_directories_that_are_too_deep_are_not_made(writer: TreeWriter, tmp_path: Path) -> None:
    for depth in range(1, 258):
        writer.tell(said("d", "root" + "/d" * depth))
    assert writer.refused
    assert not (tmp_path / "tree/root").exists()


def test_more_bytes_than_announced_are_an_error(writer: TreeWriter) -> None:
    writer.tell(said("f", "root/a", "3"))
    with pytest.raises(InternalError, match="invalid data"):
        writer.write(b"four")
