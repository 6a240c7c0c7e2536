"""Rules that choose another table than the main one: source-based routing (CNI's sbr). A guest is given the main table alone.

Functions must run inside the pod's namespace; pyroute2 has no types, so its `Any` is theirs.
"""

from __future__ import annotations

import socket
from typing import Any

# default, main, local: each namespace has rules for them.
_USUAL_TABLES = frozenset({253, 254, 255})


def read(ipr: Any) -> dict[int, tuple[str, ...]]:
    """By the index of a link that routes of such a rule's table lead to: the rules in `ip rule`'s words."""
    found: dict[int, tuple[str, ...]] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for rule in ipr.get_rules(family=family):
            table = rule.get_attr("FRA_TABLE") or rule["table"]
            if table and table not in _USUAL_TABLES:
                for index in _links_of(ipr, family, table):
                    found[index] = (*found.get(index, ()), _words(rule, table))
    return found


def _links_of(ipr: Any, family: int, table: int) -> set[int]:
    routes = [route for route in ipr.get_routes(table=table) if route["family"] == family]
    return {index for route in routes if (index := route.get_attr("RTA_OIF")) is not None}


def _words(rule: Any, table: int) -> str:
    source, mark = rule.get_attr("FRA_SRC"), rule.get_attr("FRA_FWMARK")
    return f"from {source or 'all'}{f' fwmark {mark:#x}' if mark else ''} lookup {table}"
