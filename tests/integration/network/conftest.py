"""A tapmanager on private paths for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tap_node import TapNode, private_node


@pytest.fixture
def quiet_node() -> Iterator[TapNode]:
    """Configured, not started."""
    with private_node() as made:
        yield made


@pytest.fixture
def tap_node(quiet_node: TapNode) -> TapNode:
    quiet_node.start()
    return quiet_node
