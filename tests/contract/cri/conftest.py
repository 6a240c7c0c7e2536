from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.cri import Client, served
from fakes.world import World


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[World, Client]]:
    """A node with one image on it."""
    with served(tmp_path) as (world, client, _):
        world.pull()
        world.journal.calls.clear()
        yield world, client


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Client]]:
    """One node for all tests of a file, with one image on it; each test has pods of its own."""
    with served(tmp_path_factory.mktemp("node")) as (world, client, _):
        world.pull()
        yield world, client


@pytest.fixture
def world(node: tuple[World, Client]) -> World:
    return node[0]


@pytest.fixture
def client(node: tuple[World, Client]) -> Client:
    return node[1]
