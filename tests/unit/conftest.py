from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A node with nothing on it but one image."""
    world = World(tmp_path)
    world.pull()
    world.journal.calls.clear()
    yield world
    world.close()
