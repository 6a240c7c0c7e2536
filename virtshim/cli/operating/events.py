"""`virtshim events`: what happens to the node's pods and VMs, and what operators do to them, as it happens."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final

from virtshim.cli.operating.tables import show_json_line
from virtshim.cri.operator.client import operating
from virtshim.cri.operator.node_work import working
from virtshim.domain.errors import ShimError, Unavailable
from virtshim.domain.printable import printable_text

_SHORT: Final = 12


@dataclass(frozen=True, slots=True)
class Event:
    """`at`: seconds since 1970. `what`: `pod created`, `vm started`, `pause` ... `id`: the pod's or the VM's."""

    at: float
    what: str
    id: str
    pod: str
    message: str = ""


def events(socket: str, admin: str, *, as_json: bool) -> None:
    """Until ctrl-c. Raises ShimError when the node ends the stream."""
    arrived: queue.SimpleQueue[Event | ShimError] = queue.SimpleQueue()
    for source in (lambda: _lives(socket), lambda: _actions(admin)):
        threading.Thread(target=_gather, args=(source, arrived), daemon=True).start()
    if sys.stderr.isatty():
        print("waiting for events; ctrl-c ends", file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            event = arrived.get()
            if isinstance(event, ShimError):
                raise event
            if as_json:
                show_json_line(asdict(event))
            else:
                print(line(event), flush=True)


def line(event: Event) -> str:
    stamp = datetime.fromtimestamp(event.at).astimezone().isoformat(timespec="milliseconds")
    text = f"{stamp}  {event.what:<12}  {event.pod}  {event.id[:_SHORT]}"
    return printable_text(f"{text}  {event.message}" if event.message else text)


def _lives(socket: str) -> Iterator[Event]:
    with working(socket) as node:
        for one in node.events():
            yield Event(one.at, one.what, one.id, one.pod)
    raise _ended()


def _actions(admin: str) -> Iterator[Event]:
    """None from a node without an admin socket."""
    with contextlib.ExitStack() as stack:
        try:
            operator = stack.enter_context(operating(admin))
        except ShimError:
            return
        for one in operator.actions(time.time()):
            yield Event(one.at, one.action, one.vm, one.pod, one.message)
    raise _ended()


def _ended() -> Unavailable:
    """A node that is stopped in order ends its streams without an error."""
    return Unavailable("the node has ended its events: was virtshim stopped? Run this again when it serves")


def _gather(source: Callable[[], Iterator[Event]], arrived: queue.SimpleQueue[Event | ShimError]) -> None:
    try:
        for event in source():
            arrived.put(event)
    except ShimError as exc:
        arrived.put(exc)
