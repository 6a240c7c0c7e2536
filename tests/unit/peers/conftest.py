from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.node_certificates import ClusterCa

from virtshim.peers.certificates import PeerFiles
from virtshim.peers.client import PeerClient
from virtshim.peers.ports import PeerLink
from virtshim.peers.server import PeerServer
from virtshim.system.live import Live

Serve = Callable[[Callable[[PeerLink], None]], PeerClient]


@pytest.fixture
def ca(tmp_path: Path) -> ClusterCa:
    return ClusterCa(tmp_path)


@pytest.fixture
def serve(ca: ClusterCa) -> Iterator[Serve]:
    """Starts node `two`, and gives node `one`'s client, which knows two's address."""
    with contextlib.ExitStack() as stack:

        def start(
            handle: Callable[[PeerLink], None], mine: PeerFiles | None = None, theirs: PeerFiles | None = None
        ) -> PeerClient:
            server = PeerServer("127.0.0.1:0", theirs or ca.node("two"), handle)
            server.start()
            stack.callback(server.close)
            where = f"127.0.0.1:{server.port}"
            return PeerClient(mine or ca.node("one"), Live({"two": where, "three": where}))

        yield start
