from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.world import World


@pytest.fixture
def make_world(tmp_path: Path) -> Callable[[], World]:
    made = 0

    def make() -> World:
        nonlocal made
        made += 1
        directory = tmp_path / str(made)
        directory.mkdir()
        return World(directory)

    return make
