"""What commands print: tables, in colour on a terminal and as plain columns elsewhere, lines of a chosen format, or JSON. Also
`virtshim ps`."""

from __future__ import annotations

import json
import string
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from virtshim.cri.client import PodSummary, VmSummary, connected
from virtshim.model.errors import InvalidRequest
from virtshim.model.text import printable_text

HEAD = ("POD", "POD ID", "POD STATE", "IP", "VM", "VM ID", "VM STATE", "AGE", "IMAGE")
_SHORT = 12
_AGE_UNITS = (("d", 86400), ("h", 3600), ("m", 60))


def rows(
    pods: Sequence[PodSummary], vms: Sequence[VmSummary], addresses: Mapping[str, Sequence[str]], now: float
) -> Iterator[tuple[str, ...]]:
    """One row per VM, and one per pod without a VM. `now`: seconds since 1970. The age is the VM's, or else the pod's. Pure."""
    for pod in pods:
        state = "ready" if pod.is_ready else "not ready"
        left = (f"{pod.namespace}/{pod.name}", pod.id[:_SHORT], state, ",".join(addresses[pod.id]) or "-")
        own = [vm for vm in vms if vm.pod == pod.id]
        for vm in own:
            yield (*left, vm.name, vm.id[:_SHORT], vm.shown_state, age(now - vm.created), vm.image)
        if not own:
            yield (*left, "-", "-", "-", age(now - pod.created), "-")


def age(seconds: float) -> str:
    """Writes an age in the largest unit that it contains at least twice, so that rounding loses less than a third:
    119s, 2m, 47h, 2d."""
    for unit, size in _AGE_UNITS:
        if seconds >= 2 * size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(0, seconds):.0f}s"


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Plain columns. Control characters are removed: the texts come from outside, and a terminal would obey them."""
    shown = [[printable_text(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in shown]


# By a cell's text.
_COLOURS: Final = {
    "ready": "green",
    "running": "green",
    "paused": "yellow",
    "created": "cyan",
    "exited": "dim",
    "not ready": "red",
    "unknown": "red",
}
_WIDEST: Final = 10_000
_SIZE_UNITS: Final = ("B", "K", "M", "G", "T")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Control characters are removed from the cells, because the texts come from outside."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        made.add_column(name, no_wrap=name != "IMAGE", overflow="fold")
    for row in rows:
        made.add_row(*(_cell(cell) for cell in row))
    return made


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], template: str = "") -> None:
    """`template`: see `row_format`; "" for a table."""
    if template:
        print("".join(f"{line}\n" for line in row_format(template, head, rows)), end="")
    elif sys.stdout.isatty():
        made = table(head, rows)
        console = Console(highlight=False)
        # At full width: the terminal wraps long lines, while a narrower table would cut off addresses and paths.
        wide = Measurement.get(console, console.options.update(max_width=_WIDEST), made).maximum
        Console(highlight=False, width=max(console.width, wide)).print(made)
    else:
        print("\n".join(columns([head, *rows])))


def row_format(template: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """One line per row: `{pod_id}` stands for the cell below POD ID, `\\t` for a tab. Raises InvalidRequest for a template that
    names no column. Pure."""
    names = [name.lower().replace(" ", "_") for name in head]
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as exc:
        raise InvalidRequest(f"--format: {exc}; write {{{{ for a brace") from exc
    for _, name, style, conversion in parts:
        if name is not None and (name not in names or style or conversion):
            raise InvalidRequest(f"--format: {{{name[:80]}}} is not a column; the columns are {{{'}, {'.join(names)}}}")
    for row in rows:
        cells = dict(zip(names, map(printable_text, row), strict=True))
        yield "".join(text.replace("\\t", "\t") + (cells[name] if name else "") for text, name, _, _ in parts)


def print_json(found: Any) -> None:
    print(json.dumps(found, indent=2))


def size_text(count: float) -> str:
    """Writes a number of bytes in the largest unit in which the number is above 1."""
    for unit in _SIZE_UNITS:
        if count < 1024 or unit == _SIZE_UNITS[-1]:
            return f"{count:.0f}{unit}" if count >= 10 or unit == "B" else f"{count:.1f}{unit}"
        count /= 1024
    raise AssertionError


def _cell(cell: str) -> Text:
    shown = printable_text(cell)
    return Text(shown, style=_COLOURS.get(shown, ""))


def ps(socket: str, wanted: str = "", template: str = "", *, as_json: bool = False, quiet: bool = False) -> None:
    """`wanted`: see `_texts`; "" for all. `template`: see `row_format`. `quiet`: ids of VMs only."""
    with connected(socket) as node:
        pods, vms = node.pods(), [node.with_trouble(vm) for vm in node.vms()]
        addresses = {pod.id: node.addresses(pod.id) for pod in pods}
    pods = [pod for pod in pods if any(wanted in text for text in _texts(pod, vms, addresses[pod.id]))]
    vms = [vm for vm in vms if any(vm.pod == pod.id for pod in pods)]
    if quiet and not as_json:
        print("".join(f"{vm.id}\n" for vm in vms), end="")
        return
    if not as_json:
        print_table(HEAD, rows(pods, vms, addresses, time.time()), template)
        return
    print_json(
        [
            {
                "id": pod.id,
                "namespace": pod.namespace,
                "name": pod.name,
                "ready": pod.is_ready,
                "addresses": addresses[pod.id],
                "createdAt": pod.created,
                "vms": [
                    {
                        "id": vm.id,
                        "name": vm.name,
                        "attempt": vm.attempt,
                        "state": vm.shown_state,
                        "trouble": vm.trouble,
                        "image": vm.image,
                        "createdAt": vm.created,
                    }
                    for vm in vms
                    if vm.pod == pod.id
                ],
            }
            for pod in pods
        ]
    )


def _texts(pod: PodSummary, vms: Iterable[VmSummary], addresses: Sequence[str]) -> Iterator[str]:
    """The texts of a pod that --filter searches."""
    yield f"{pod.namespace}/{pod.name}"
    yield pod.id
    yield from addresses
    for vm in vms:
        if vm.pod == pod.id:
            yield from (vm.id, vm.name, vm.shown_state, vm.image)
