"""A tapmanager on private paths: one for all tests that do with it as it was set up, one of its own for each other test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tap_node import TapNode, for_a_test, private_node


@pytest.fixture
def quiet_node() -> Iterator[TapNode]:
    """Configured, not started; of this test alone."""
    with private_node() as made:
        yield made


@pytest.fixture(scope="package")
def _running_node() -> Iterator[TapNode]:
    with private_node() as made:
        made.start()
        yield made


@pytest.fixture
def tap_node(_running_node: TapNode) -> Iterator[TapNode]:
    """It runs, and serves other tests before and after this one, which may start it again and configure it as it likes."""
    with for_a_test(_running_node) as node:
        yield node
