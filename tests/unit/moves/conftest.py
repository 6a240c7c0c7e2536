from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.state_volume import Cluster
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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    volume = tmp_path / "volume"
    volume.mkdir()
    made = Cluster(tmp_path, volume)
    yield made
    for world in made.worlds:
        world.close()
