"""The node keeps the right templates, and a program gives guests new random numbers."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

import virtshim.templates
from virtshim.templates.guest_identity import RESEED
from virtshim.templates.values import Kept, to_drop

KEPT = [Kept("old", 40, 1.0), Kept("new", 30, 9.0), Kept("older", 20, 0.5)]


@pytest.mark.parametrize(
    ("wanted", "gone"),
    [(10, ()), (11, ("older",)), (30, ("older",)), (31, ("older", "old")), (100, ("older", "old", "new"))],
)
def test_templates_that_were_not_used_for_the_longest_time_make_room(wanted: int, gone: tuple[str, ...]) -> None:
    assert to_drop(KEPT, wanted, 100) == gone


def test_nothing_makes_room_for_more_than_all_may_take() -> None:
    assert to_drop(KEPT, 101, 100) is None


def test_the_program_that_reseeds_is_the_one_whose_source_is_here(tmp_path: Path) -> None:
    source = Path(virtshim.templates.__file__).parent / "reseed.S"
    subprocess.run(["as", "-o", tmp_path / "o", source], check=True)
    subprocess.run(["ld", "-Ttext", "0x10000", "--oformat", "binary", "-o", tmp_path / "p", tmp_path / "o"], check=True)
    assert base64.b64decode(RESEED) == (tmp_path / "p").read_bytes()


def test_the_program_that_reseeds_refuses_less_than_all_bytes(tmp_path: Path) -> None:
    program = tmp_path / "reseed"
    program.write_bytes(base64.b64decode(RESEED))
    program.chmod(0o700)
    for length in (0, 15, 16, 79):
        assert subprocess.run([program], input=bytes(length), check=False).returncode == 5
