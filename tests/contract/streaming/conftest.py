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
        # Some clients here neither read nor leave when they are done. The server waits this long for each of them.
        made.append(StreamNode(StreamTimeouts(**{"linger": 0.2, "leaving": 1.0, **limits})))
        made[-1].start()
        return made[-1]

    yield make
    close_all()
    for node in made:
        node.server.stop()


@pytest.fixture
def node(make_node: Callable[..., StreamNode]) -> StreamNode:
    return make_node()
