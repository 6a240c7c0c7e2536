"""Pods can be removed if the state directory's disk fills up and virtshim stops and starts again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.world import World

from virtshim.model.errors import ResourceExhausted
from virtshim.store.records import SqliteRecords

pytestmark = pytest.mark.faults

_MOST = 24 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "state"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_MOST}", "small", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("ab") as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    os.write(file.fileno(), bytes(size))
            except OSError:
                continue


def test_pods_are_removed_after_a_clean_stop_and_a_start_on_a_full_disk(small_disk: Path) -> None:
    SqliteRecords(str(small_disk / "state.db")).close()  # with a reserve that takes its room
    world = World(small_disk)
    sandbox, _ = world.running()
    world.close()
    fill(small_disk)  # the write-ahead log, which a clean stop removes, has left its room
    world.outside.vms.forget()
    world = World(small_disk, world.outside)
    try:
        world.records.set_node_fact("boot", "another")
        with pytest.raises(ResourceExhausted):
            world.run("new")
        world.remove_sandbox(sandbox)
        assert world.records.sandboxes.all() == []
        assert world.records.containers.all() == []
    finally:
        world.close()
