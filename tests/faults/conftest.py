"""A node whose daemons die on order, beside a VM that must not notice."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.loop import loop_device, no_loop_devices
from imageserver import serve_directory
from leaks import Snapshot
from mortal_node import MortalNode
from work import Work, working


@pytest.fixture(scope="package")
def mortal(guest_image: Path) -> Iterator[MortalNode]:
    """One node for the modules here; it ends with the last of them, so that its leak check sees no other tests' traces."""
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


@contextlib.contextmanager
def root_volume(file: Path) -> Iterator[str]:
    """A block device, "" where the machine has none."""
    if no_loop_devices()["condition"]:
        yield ""
        return
    with file.open("wb") as made:
        made.truncate(4 << 20)
    with loop_device(file) as device:
        yield str(device)


@pytest.fixture
def work(mortal: MortalNode) -> Iterator[Work]:
    """A pod to be; afterwards nothing is left of it, and the VM beside it has noticed nothing."""
    with working(mortal, Work.pull) as work:
        yield work
        mortal.check_bystander(work.cri)
