"""A tapmanager on private paths: one shared by the tests that use the standard setup, and one for each other test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tap_node import TapNode, for_a_test, private_node


@pytest.fixture
def quiet_node() -> Iterator[TapNode]:
    """A configured but not started node, for one test."""
    with private_node() as made:
        yield made


@pytest.fixture(scope="package")
def _running_node() -> Iterator[TapNode]:
    with private_node() as made:
        made.start()
        yield made


@pytest.fixture
def tap_node(_running_node: TapNode) -> Iterator[TapNode]:
    """A running node that other tests use before and after; a test may restart and reconfigure it."""
    with for_a_test(_running_node) as node:
        yield node
