"""With --all, every example is tried. Examples have their directories below pytest's. In `make test` these are in
memory, because a disk's fsync would take a third of the time."""

import tempfile
from collections.abc import Iterator

import pytest
from fakes.examples import take_all


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        take_all()


@pytest.fixture(scope="module", autouse=True)
def _below_pytests_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("examples"))
    yield
    tempfile.tempdir = before
