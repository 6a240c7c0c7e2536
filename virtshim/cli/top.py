"""`virtshim top` shows what the node's VMs use, and refreshes it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console
from rich.live import Live

from virtshim.cli import terminal
from virtshim.cli.tables import print_json, print_table, size_text, table
from virtshim.cri.client import NodeClient, PodSummary, PodUsage, connected
from virtshim.model.errors import InvalidRequest

_HEAD: Final = ("POD", "CPU", "MEMORY", "DISK", "RX/s", "TX/s")
# Sort keys. The largest value comes first, except for names.
SORTS: Final = ("cpu", "memory", "disk", "network", "name")
_SOONEST, _LATEST = 0.2, 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """`cpu` in cores; `memory` and `disk` in bytes; `received` and `sent` in bytes a second."""

    pod: str
    id: str
    cpu: float
    memory: int
    disk: int
    received: float
    sent: float


def top(socket: str, *, sort: str, interval: float, once: bool, as_json: bool) -> None:
    """Runs until Ctrl-C. Raises ShimError."""
    if sort not in SORTS:
        raise InvalidRequest(f"--sort {sort[:40]!r}: must be one of {', '.join(SORTS)}")
    if not _SOONEST <= interval <= _LATEST:
        raise InvalidRequest(f"--interval {interval:g}: must be {_SOONEST:g} to {_LATEST:g} seconds")
    pause = threading.Event()
    with connected(socket) as node, contextlib.suppress(KeyboardInterrupt):
        before = _read(node)
        pause.wait(min(interval, 1.0))
        rows, before = _next(node, before, sort)
        if as_json:
            print_json([asdict(row) for row in rows])
        elif once or not sys.stdout.isatty():
            print_table(_HEAD, map(cells, rows))
        else:
            shown = Live(table(_HEAD, map(cells, rows)), console=Console(highlight=False), screen=True)
            with terminal.ended_by_signals(), shown as live:
                while not pause.wait(interval):
                    rows, before = _next(node, before, sort)
                    live.update(table(_HEAD, map(cells, rows)), refresh=True)


def _read(node: NodeClient) -> Mapping[str, PodUsage]:
    return {usage.pod: usage for usage in node.usage()}


def _next(node: NodeClient, before: Mapping[str, PodUsage], sort: str) -> tuple[list[Row], Mapping[str, PodUsage]]:
    pods, now = node.pods(), _read(node)
    return ordered(rates(pods, before, now), sort), now


def rates(pods: Sequence[PodSummary], before: Mapping[str, PodUsage], now: Mapping[str, PodUsage]) -> list[Row]:
    """One row for each pod that has figures now. A pod without earlier figures has no rates yet. Pure."""
    rows = []
    for pod in pods:
        if (usage := now.get(pod.id)) is None:
            continue
        earlier = before.get(pod.id, usage)
        seconds = usage.at - earlier.at

        def rate(later: float, first: float, seconds: float = seconds) -> float:
            return max(0.0, later - first) / seconds if seconds > 0 else 0.0

        rows.append(
            Row(
                f"{pod.namespace}/{pod.name}",
                pod.id,
                round(rate(usage.cpu, earlier.cpu), 3),
                usage.memory,
                usage.disk,
                round(rate(usage.received, earlier.received), 1),
                round(rate(usage.sent, earlier.sent), 1),
            )
        )
    return rows


def ordered(rows: Sequence[Row], sort: str) -> list[Row]:
    match sort:
        case "name":
            return sorted(rows, key=lambda row: row.pod)
        case "network":
            return sorted(rows, key=lambda row: row.received + row.sent, reverse=True)
        case _:
            return sorted(rows, key=lambda row: float(getattr(row, sort)), reverse=True)


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.pod,
        f"{row.cpu * 100:.0f}%",
        size_text(row.memory),
        size_text(row.disk),
        size_text(row.received),
        size_text(row.sent),
    )
