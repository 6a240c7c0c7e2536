"""Additional networks for the pods that a node starts next."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from fakes import calico_plugin, chain_plugin, meta_plugin
from node import Node

Conf = dict[str, object]


@contextlib.contextmanager
def networks(node: Node, folder: Path, *delegates: Conf) -> Iterator[None]:
    """All networks, by a meta plugin that keeps its records below `folder`."""
    _install(node, "meta", meta_plugin)
    _install(node, "calico", calico_plugin)
    _install(node, "chain", chain_plugin)
    meta = {"type": "meta", "cniDir": str(folder / "multus"), "delegates": delegates}
    first = Path(node.directory, "cni/net.d/00-first.conflist")
    first.write_text(json.dumps({"cniVersion": "1.0.0", "name": "first", "plugins": [meta]}))
    try:
        yield
    finally:
        first.unlink()


def own_network(node: Node) -> Conf:
    """The network that the node's pods have otherwise."""
    own = json.loads(next(Path(node.directory, "cni/net.d").glob("*.conflist")).read_text())
    return {"name": own["name"], **own["plugins"][0]}


def leases(folder: Path, subnet: str) -> Conf:
    """An IPAM section, with a default route."""
    return {
        "type": "host-local",
        "ranges": [[{"subnet": subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(folder / "leases"),
    }


def _install(node: Node, name: str, program: ModuleType) -> None:
    plugin = Path(node.directory).parent / "cni-bin" / name
    plugin.parent.mkdir(exist_ok=True)
    plugin.write_text(f"#!/bin/sh\nexec {sys.executable} {program.__file__}\n")
    plugin.chmod(0o755)
