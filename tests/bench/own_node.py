"""A node for measurements alone, in a temporary directory."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from node import Node, free_cidr


@contextlib.contextmanager
def own_node(within: str = "/var/tmp", config: str = "") -> Iterator[tuple[Node, str]]:
    """The running node, and its directory. `config`: more settings, as TOML."""
    with tempfile.TemporaryDirectory(prefix="vs-bench-", dir=within, ignore_cleanup_errors=True) as directory:
        os.chmod(directory, 0o711)
        node = Node(f"{directory}/n", pod_cidr=free_cidr(), config=config)
        node.up()
        try:
            yield node, directory
        finally:
            node.stop()
            node.down()
