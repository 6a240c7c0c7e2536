"""Links, addresses, routes, neighbours and packet filters, of the node and of each pod's namespace."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from virtshim.cli.diag.gather import File, Node
from virtshim.cli.diag.programs import all_said, listing
from virtshim.cli.diag.records import ledger_namespaces

_MOST_NAMESPACES: Final = 100

_LINKS: Final = (("ip", "-s", "-d", "address", "show"), ("bridge", "-d", "link", "show"), ("bridge", "fdb", "show"))
_ROUTES: Final = (
    ("ip", "-4", "route", "show", "table", "all"),
    ("ip", "-6", "route", "show", "table", "all"),
    ("ip", "-4", "rule", "show"),
    ("ip", "-6", "rule", "show"),
    ("ip", "neighbour", "show"),
)
_FILTERS: Final = (("nft", "list", "ruleset"),)


def network(_node: Node) -> Iterator[File]:
    """The node's own."""
    yield "links.txt", all_said(*_LINKS, ("bridge", "vlan", "show"))
    yield "routes.txt", all_said(*_ROUTES)
    yield "nft.txt", all_said(*_FILTERS)
    yield "iptables.txt", all_said(("iptables-save", "-c"), ("ip6tables-save", "-c"))
    yield "sockets.txt", all_said(("ss", "-lntup"), ("ss", "-lxp"))
    yield "forwarding.txt", all_said(("sysctl", "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.bridge"))


def namespaces(node: Node) -> Iterator[File]:
    """The pods'."""
    directory = node.settings.tapmanager.netns_dir
    yield "all.txt", listing(directory)
    ours = ledger_namespaces(node)
    for path in ours[:_MOST_NAMESPACES]:
        inside = [_in(path, command) for command in (*_LINKS, *_ROUTES, *_FILTERS)]
        yield f"{os.path.basename(path)}.txt", all_said(*inside, seconds=5)
    if len(ours) > _MOST_NAMESPACES:
        yield "left-out.txt", "".join(f"{path}\n" for path in ours[_MOST_NAMESPACES:])


def _in(path: str, command: Sequence[str]) -> Sequence[str]:
    return ("nsenter", f"--net={path}", "--", *command)
