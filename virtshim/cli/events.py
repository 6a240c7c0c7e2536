"""`virtshim events` follows what happens to the node's pods and VMs, and what operators do to them."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import datetime
from typing import Final

from virtshim.cri.client import NodeClient, NodeEvent, connected
from virtshim.cri.operator_client import OperatorClient, operating
from virtshim.model.errors import ShimError, Unavailable
from virtshim.model.text import printable_text

_SHORT: Final = 12


def events(socket: str, admin: str, *, as_json: bool) -> None:
    """Prints events until Ctrl-C. Raises ShimError when the node ends the stream."""
    show_events(connected(socket), operating(admin), as_json=as_json)


def show_events(
    node: AbstractContextManager[NodeClient], operator: AbstractContextManager[OperatorClient], *, as_json: bool
) -> None:
    arrived: queue.SimpleQueue[NodeEvent | ShimError] = queue.SimpleQueue()
    for source in (_lives(node), _actions(operator)):
        threading.Thread(target=_gather, args=(source, arrived), daemon=True).start()
    if sys.stderr.isatty():
        print("waiting for events; Ctrl-C ends", file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            event = arrived.get()
            if isinstance(event, ShimError):
                raise event
            print(json.dumps(asdict(event)) if as_json else line(event), flush=True)


def line(event: NodeEvent) -> str:
    stamp = datetime.fromtimestamp(event.at).astimezone().isoformat(timespec="milliseconds")
    text = f"{stamp}  {event.what:<12}  {event.pod}  {event.id[:_SHORT]}"
    return printable_text(f"{text}  {event.message}" if event.message else text)


def _lives(node: AbstractContextManager[NodeClient]) -> Iterator[NodeEvent]:
    with node as connected:
        yield from connected.events()
    raise _ended()


def _actions(operator: AbstractContextManager[OperatorClient]) -> Iterator[NodeEvent]:
    """Yields nothing from a node without an admin socket."""
    with contextlib.ExitStack() as stack:
        try:
            connected = stack.enter_context(operator)
        except ShimError:
            return
        for one in connected.actions(time.time()):
            yield NodeEvent(one.at, one.action, one.vm, one.pod, one.message)
    raise _ended()


def _ended() -> Unavailable:
    """A node that shuts down cleanly ends its streams without an error."""
    return Unavailable(
        "the node closed its event stream; was virtshim stopped? Run this command again when virtshim serves"
    )


def _gather(source: Iterator[NodeEvent], arrived: queue.SimpleQueue[NodeEvent | ShimError]) -> None:
    try:
        for event in source:
            arrived.put(event)
    except ShimError as exc:
        arrived.put(exc)
