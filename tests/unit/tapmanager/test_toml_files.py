"""Each setting of a TOML file has its line, and drop-ins override earlier files."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapmanager import toml_files
from tapmanager.toml_files import Key, Layers, lines_of, nearest

DOCUMENT = '''\
top = 1
# a comment
[a]
x = """
[not.a.table]
"""
"quoted.key" = 2
b.c = 3

[[a.list]]
y = [
  1, # one
  2,
]
[[a.list]]
[a.list.inner]
z = {w = 1, v = [{u = 1}]}
'''


def test_each_key_is_at_the_line_where_its_statement_begins() -> None:
    expected: dict[Key, int] = {
        ("top",): 1,
        ("a",): 3,
        ("a", "x"): 4,
        ("a", "quoted.key"): 7,
        ("a", "b"): 8,
        ("a", "b", "c"): 8,
        ("a", "list", 0): 10,
        ("a", "list", 0, "y"): 11,
        ("a", "list", 0, "y", 0): 11,
        ("a", "list", 0, "y", 1): 11,
        ("a", "list", 1): 15,
        ("a", "list", 1, "inner"): 16,
        ("a", "list", 1, "inner", "z"): 17,
        ("a", "list", 1, "inner", "z", "w"): 17,
        ("a", "list", 1, "inner", "z", "v"): 17,
        ("a", "list", 1, "inner", "z", "v", 0): 17,
        ("a", "list", 1, "inner", "z", "v", 0, "u"): 17,
    }
    assert dict(lines_of(DOCUMENT)) == expected


VALUES = st.one_of(st.integers(0, 9), st.just([1, 2]), st.text("ab \n", max_size=4))


@given(st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.sampled_from("xyz"), VALUES), max_size=4))
def test_every_value_of_a_document_has_a_line_that_names_it(tables: dict[str, dict[str, object]]) -> None:
    written = ""
    for table, keys in tables.items():
        written += f"[{table}]\n\n"
        for key, value in keys.items():
            text = (
                f'"""\n{value}"""'
                if isinstance(value, str)
                else f"[\n{value[0]},\n2]"
                if isinstance(value, list)
                else value
            )
            written += f"{key} = {text} # said\n"
    assert tomllib.loads(written) == tables
    lines, found = written.split("\n"), dict(lines_of(written))
    for table, keys in tables.items():
        for key in keys:
            assert lines[found[table, key] - 1].startswith(f"{key} =")


def test_a_later_file_wins_key_by_key_and_replaces_lists(tmp_path: Path) -> None:
    file, drop_ins = tmp_path / "f.toml", tmp_path / "f.toml.d"
    drop_ins.mkdir()
    file.write_text("[a]\nx = 1\ny = [1, 2, 3]\nz = 5\n")
    (drop_ins / "20.toml").write_text("a.x = 3\n")
    (drop_ins / "10.toml").write_text("[a]\nx = 2\ny = [4]\n")
    layers = toml_files.read(str(file))
    assert layers.values == {"a": {"x": 3, "y": [4], "z": 5}}
    assert layers.place(("a", "x")) == f"{drop_ins}/20.toml:1"
    assert layers.place(("a", "y", 0)) == f"{drop_ins}/10.toml:3"
    assert ("a", "y", 2) not in layers.places
    assert layers.place(("a", "z")) == f"{file}:4"
    assert layers.files == [str(file), f"{drop_ins}/10.toml", f"{drop_ins}/20.toml"]


def test_a_file_may_be_missing_if_it_has_drop_ins_or_was_not_named(tmp_path: Path) -> None:
    file, drop_ins = tmp_path / "f.toml", tmp_path / "f.toml.d"
    assert toml_files.read(str(file), must_be_there=False) == Layers()
    assert toml_files.read(str(file)).faults == [f"{file}: cannot be read: No such file or directory"]
    drop_ins.mkdir()
    (drop_ins / "1.toml").write_text("good = 1\n")
    layers = toml_files.read(str(file))
    assert (layers.values, layers.files, layers.faults) == ({"good": 1}, [f"{drop_ins}/1.toml"], [])


def test_all_unreadable_files_are_reported_and_the_others_are_read(tmp_path: Path) -> None:
    file, drop_ins = tmp_path / "f.toml", tmp_path / "f.toml.d"
    drop_ins.mkdir()
    file.write_text("x = 1\n\ny = = 2\n")
    (drop_ins / "1.toml").write_bytes(b"\xff")
    (drop_ins / "2.toml").write_text("z = [1,")
    (drop_ins / "3.toml").mkdir()
    (drop_ins / "4.toml").write_text("good = 1\n")
    layers = toml_files.read(str(file))
    assert layers.values == {"good": 1}
    assert [fault.split(": ")[:2] for fault in layers.faults] == [
        [f"{file}:3", "is not TOML"],
        [f"{drop_ins}/1.toml", "is not TOML"],
        [f"{drop_ins}/2.toml:1", "is not TOML"],
        [f"{drop_ins}/3.toml", "cannot be read"],
    ]


def test_an_unset_setting_has_no_place() -> None:
    layers = Layers()
    layers.lay({"a": {"b": 1}}, {("a", "b"): "somewhere"})
    assert (layers.place(("a",)), layers.place(("a", "b", 3)), layers.place(("c",))) == ("somewhere", "somewhere", "")


@pytest.mark.parametrize(("word", "meant"), [("max_vcpu", "max_vcpus"), ("sokcet", "socket"), ("frobnicate", "")])
def test_a_misspelt_name_suggests_the_nearest_known_one(word: str, meant: str) -> None:
    assert nearest(word, ["socket", "max_vcpus", "room_vcpus"]) == meant
