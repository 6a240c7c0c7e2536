"""Nodes for measurements alone, in temporary directories."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from node import Node, free_cidr
from peer_nodes import PeerNodes


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


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """`here` and `there`, which move VMs to each other."""
    with tempfile.TemporaryDirectory(prefix="vs-bench-", dir="/var/tmp", ignore_cleanup_errors=True) as directory:
        os.chmod(directory, 0o711)
        peers, quiet = PeerNodes(directory), '[metrics]\naddress = ""\nproxy_address = ""\n'
        with contextlib.ExitStack() as stack:
            nodes = []
            for name, uid in (("here", 1_900_000_000), ("there", 1_910_000_000)):
                config = f"{quiet}[libvirt]\nfirst_vm_uid = {uid}\n{peers.settings(name)}"
                node = Node(f"{directory}/{name}", pod_cidr=free_cidr(), config=config)
                stack.callback(node.down)
                node.up()
                node.make_bridge()
                stack.callback(node.stop)
                nodes.append(node)
            yield nodes[0], nodes[1]
