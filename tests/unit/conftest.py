import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.apiserver import Api
from fakes.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A node with nothing on it but one image."""
    world = World(tmp_path)
    world.pull()
    world.journal.calls.clear()
    yield world
    world.close()


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting comes from the environment."""
    for name in list(os.environ):
        if name.startswith("VIRTSHIM_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Its answers are for the test to say."""
    api = Api(tmp_path_factory.mktemp("api"))
    yield api
    api.close()
