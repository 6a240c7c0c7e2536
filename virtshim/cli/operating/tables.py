"""What commands print: tables, in colour on a terminal, plain columns elsewhere; or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from virtshim.cli.ps import columns
from virtshim.domain.printable import printable_text

_COLOURS: Final = {
    "ready": "green",
    "running": "green",
    "paused": "yellow",
    "created": "cyan",
    "exited": "dim",
    "not ready": "red",
    "unknown": "red",
}
# Of a line of a table.
_WIDEST: Final = 10_000
_UNITS: Final = ("B", "K", "M", "G", "T")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """What the node got from others is shown without control characters."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        made.add_column(name, no_wrap=name != "IMAGE", overflow="fold")
    for row in rows:
        made.add_row(*(_cell(cell) for cell in row))
    return made


def show(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    if sys.stdout.isatty():
        made = table(head, rows)
        console = Console(highlight=False)
        # As wide as it is: a terminal breaks long lines, and a narrower table leaves out the ends of addresses and paths.
        wide = Measurement.get(console, console.options.update(max_width=_WIDEST), made).maximum
        Console(highlight=False, width=max(console.width, wide)).print(made)
    else:
        print("\n".join(columns([head, *rows])))


def show_json(found: Any) -> None:
    print(json.dumps(found, indent=2))


def show_json_line(found: Mapping[str, Any]) -> None:
    """One of many that come one by one."""
    print(json.dumps(found), flush=True)


def size(count: float) -> str:
    """Bytes, in the largest unit that leaves a number above 1."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f}{unit}" if count >= 10 or unit == "B" else f"{count:.1f}{unit}"
        count /= 1024
    raise AssertionError


def _cell(cell: str) -> Text:
    shown = printable_text(cell)
    return Text(shown, style=_COLOURS.get(shown, ""))
