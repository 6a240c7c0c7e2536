"""A streaming server with sessions that tests script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.spdy import close_all
from fakes.streamnode import StreamNode

from virtshim.streaming.connection import StreamTimeouts


@pytest.fixture
def make_node() -> Iterator[Callable[..., StreamNode]]:
    made: list[StreamNode] = []

    def make(**limits: Any) -> StreamNode:
        made.append(StreamNode(StreamTimeouts(**limits)))
        made[-1].start()
        return made[-1]

    yield make
    close_all()
    for node in made:
        node.server.stop()


@pytest.fixture
def node(make_node: Callable[..., StreamNode]) -> StreamNode:
    return make_node()
