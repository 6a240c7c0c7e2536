"""A node whose daemons can be killed at chosen steps, beside a VM that must not be affected."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.loop import loop_device, no_loop_devices
from imageserver import serve_directory
from kill_points import how_to_repeat
from leaks import Snapshot
from mortal_node import MortalNode
from small_disk import SmallDisk, missing
from work import Work, working


def pytest_report_header() -> str:
    return f"kill points: {how_to_repeat()}"


@pytest.fixture
def every_point(request: pytest.FixtureRequest) -> bool:
    """Whether this run kills at every point."""
    return bool(request.config.getoption("--all"))


@pytest.fixture(scope="package")
def mortal(guest_image: Path) -> Iterator[MortalNode]:
    """One node for the modules here. It ends with the last of them, so its leak check sees no traces of other tests."""
    before = Snapshot.take()
    directory = tempfile.mkdtemp(prefix="virtshim-faults-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    try:
        with serve_directory(guest_image.parent) as url:
            node = MortalNode(f"{directory}/n", url.removeprefix("http://"))
            try:
                node.up()
                node.start_bystander()
                with root_volume(Path(directory, "volume")) as node.root_volume:
                    yield node
            finally:
                node.end()
        left = before.settled(seconds=10)
        assert not left, "left behind: " + "; ".join(left)
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="package")
def place_for_a_node() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="virtshim-spare-", dir="/var/tmp"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="package")
def small_disk(place_for_a_node: Path) -> Iterator[SmallDisk | None]:
    """The disk of the expendable node's state, None if the machine can have none."""
    if missing():
        yield None
        return
    disk = SmallDisk(place_for_a_node / "disk", place_for_a_node / "n" / "state", megabytes=64)
    disk.mount()
    yield disk


@pytest.fixture(scope="package")
def expendable(guest_image: Path, place_for_a_node: Path, small_disk: SmallDisk | None) -> Iterator[MortalNode]:
    """A node without a bystander VM: its disk may fill up and break, and the node may be restarted."""
    with serve_directory(guest_image.parent) as url:
        node = MortalNode(f"{place_for_a_node}/n", url.removeprefix("http://"))
        try:
            node.up()
            with node.client() as cri:  # the bridge comes with the first pod and stays
                pod = Work(node, cri, "")
                pod.run()
                pod.remove_pod()
            yield node
        finally:
            node.stop()
            if small_disk is not None:
                small_disk.unmount()
            node.end()


@contextlib.contextmanager
def root_volume(file: Path) -> Iterator[str]:
    """A block device, "" if the machine has none."""
    if no_loop_devices()["condition"]:
        yield ""
        return
    with file.open("wb") as made:
        made.truncate(4 << 20)
    with loop_device(file) as device:
        yield str(device)


@pytest.fixture
def real_disk() -> Iterator[Path]:
    """A directory on a real disk, for tests of durability; other temporary files are in memory."""
    places = [Path(__file__).resolve().parents[2] / "build", Path("/tmp")]
    places = [place for place in places if place.is_dir() and not is_in_memory(place)]
    assert places, "neither the project's build directory nor /tmp is on a disk"
    with tempfile.TemporaryDirectory(prefix="virtshim-disk-", dir=places[0]) as directory:
        yield Path(directory)


def is_in_memory(place: Path) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", place], check=True, capture_output=True, text=True).stdout.strip()
    return kind in ("tmpfs", "ramfs")


@pytest.fixture
def work(mortal: MortalNode) -> Iterator[Work]:
    """A pod for the test. Afterwards nothing of it is left, and the bystander VM is unaffected."""
    with working(mortal, Work.pull) as work:
        yield work
        mortal.check_bystander(work.cri)
