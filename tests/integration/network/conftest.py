"""A tapmanager on private paths for each test, and the check that it left nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tap_node import TapNode, until


@pytest.fixture
def quiet_node() -> Iterator[TapNode]:
    """Configured, not started. A short path: socket names hold 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="vst-"))
    made = TapNode(folder)
    try:
        yield made
    finally:
        try:
            left: list[str] = made.leftovers()
            with_time = _settled(made) if left else []
        finally:
            made.clean()
            shutil.rmtree(folder)
    assert with_time == [], "left behind by tapmanager"


def _settled(node: TapNode) -> list[str]:
    """A veth goes a moment after its namespace."""
    try:
        until(lambda: not node.leftovers(), 5)
    except AssertionError:
        return node.leftovers()
    return []


@pytest.fixture
def tap_node(quiet_node: TapNode) -> TapNode:
    quiet_node.start()
    return quiet_node
