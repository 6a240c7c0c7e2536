"""Keeps the state of the node up to date: polls it every two seconds, and at once after an event.

Pages are listeners. Each gets the whole state, then the changes. A listener that falls behind is dropped and starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog

from virtshim.dashboard import views
from virtshim.dashboard.node_calls import Pod, Seen
from virtshim.dashboard.readings import NODE, Event, Graphs, Rates, Timeline, total
from virtshim.model.errors import ShimError

log = structlog.get_logger(__name__)

# Seconds between two polls: while a page is open, while none is, and while the node does not answer.
_WATCHED: Final = 2.0
_UNWATCHED: Final = 10.0
_LOST: Final = 1.0
# Polling may use only a small part of the time, however big the node is. Yet one slow poll must not stop the updates for long.
_TIMES_AS_LONG: Final = 20.0
_LONGEST: Final = 30.0
_QUEUE: Final = 64

Message = Mapping[str, Any]


class Node(Protocol):
    """The calls that the watch needs. They block and raise ShimError."""

    def look(self) -> Seen: ...

    def addresses(self, pod: str) -> list[str]: ...

    def follow(
        self, tell: Callable[[str, float, str, str], None], started: Callable[[Callable[[], object]], None]
    ) -> None: ...

    def follow_actions(self, tell: Callable[[str, float, str, str], None]) -> None: ...


class Listener:
    """`overrun` is set when the listener fell behind."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Message] = asyncio.Queue(_QUEUE)
        self.overrun = asyncio.Event()

    def put(self, message: Message) -> None:
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.overrun.set()

    async def get(self) -> Message:
        return await self._queue.get()


def pause_after(*, connected: bool, watched: bool, busy: float) -> float:
    """Seconds until the next poll, after one that took `busy` seconds. A failed poll lasted as long as its time limit, which says
    nothing about the node's load."""
    if not connected:
        return _LOST
    return min(max(_WATCHED if watched else _UNWATCHED, _TIMES_AS_LONG * busy), _LONGEST)


class NodeWatch:
    def __init__(
        self,
        node: Node,
        host_facts: Callable[[], Mapping[str, object]],
        pauses: Callable[..., float] = pause_after,
        gather: float = 0.2,
        graphs: Graphs | None = None,
    ) -> None:
        """Events come in groups: after one, wait `gather` seconds for more. `graphs`: samples from before."""
        self._pauses = pauses
        self._gather = gather
        self._node = node
        self._host_facts = host_facts
        self._seen: Seen | None = None
        self._trouble = "not asked yet"
        self._addresses: dict[tuple[str, bool], Sequence[str]] = {}
        self._told: list[dict[str, Any]] = []
        self._host: Mapping[str, object] = {}
        self._graphs = graphs or Graphs()
        self._rates = Rates()
        self._timeline = Timeline()
        self._listeners: set[Listener] = set()
        self._wake = asyncio.Event()

    # --- for pages

    @contextlib.contextmanager
    def listening(self) -> Iterator[Listener]:
        """A new listener within the block. Its first message is the whole state."""
        listener = Listener()
        listener.put(self._state())
        self._listeners.add(listener)
        self._wake.set()
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def graph(self, pod: str, span: int) -> list[list[float | None]]:
        """`span`: one of `SPANS`."""
        return views.graph(self._graphs.samples(pod, span=span))

    def vms_of(self, pod: str) -> list[str]:
        """Ids of the pod's VMs, newest first."""
        return [vm.id for one in self._pods_seen() if one.id == pod for vm in one.vms]

    def _pods_seen(self) -> Sequence[Pod]:
        return self._seen.pods if self._seen else ()

    # --- the work

    async def run(self) -> None:
        """Runs until it is cancelled."""
        with self._following():
            while True:
                began = time.monotonic()
                connected = await self._look()
                busy = time.monotonic() - began
                pause = self._pauses(connected=connected, watched=bool(self._listeners), busy=busy)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)
                    await asyncio.sleep(max(self._gather, min(busy, pause)))
                self._wake.clear()

    async def _look(self) -> bool:
        try:
            seen = await asyncio.to_thread(self._node.look)
            await self._learn_addresses(seen)
            host = await asyncio.to_thread(self._host_facts)
        except ShimError as exc:
            self._lost(str(exc))
            return False
        self._take(seen, host)
        return True

    async def _learn_addresses(self, seen: Seen) -> None:
        """Asks for addresses of pods. A pod keeps its addresses while it is ready. Failed calls are repeated at the next poll."""
        wanted = [(pod.id, pod.ready) for pod in seen.pods]
        unknown = [key for key in wanted if key not in self._addresses]
        known = {**self._addresses, **await asyncio.to_thread(self._answered, unknown)}
        self._addresses = {key: known[key] for key in wanted if key in known}

    def _answered(self, wanted: Sequence[tuple[str, bool]]) -> dict[tuple[str, bool], Sequence[str]]:
        found: dict[tuple[str, bool], Sequence[str]] = {}
        for key in wanted:
            with contextlib.suppress(ShimError):  # the pod has gone, or the next poll reports the error
                found[key] = self._node.addresses(key[0])
        return found

    def _take(self, seen: Seen, host: Mapping[str, object]) -> None:
        before, self._seen, was, self._trouble, self._host = self._seen, seen, self._trouble, "", host
        if before is None:
            for pod in sorted(seen.pods, key=lambda one: one.created):
                self._happened("created", pod.created, pod.id, f"pod {pod.namespace}/{pod.name} created")
        elif was:
            self._happened("back", seen.at, "", "the node answers again")
        for name, trouble in seen.conditions.items():
            if before is not None and trouble != before.conditions.get(name, ""):
                self._happened("trouble" if trouble else "fine", seen.at, "", f"{name}: {trouble or 'is fine again'}")
        samples = self._rates.samples(seen.at, seen.readings)
        samples[NODE] = total(seen.at, samples)
        self._graphs.add(samples)
        self._graphs.keep(pod.id for pod in seen.pods)
        told, self._told = self._told, self._pods()
        if was:
            self._tell(self._state())
            return
        if told != self._told:  # also for addresses and sizes, which may become known later
            self._tell({"type": "pods", "pods": self._told})
        self._tell({"type": "node", "node": views.node(seen, host, "")})
        self._tell(views.tick(seen, samples))

    def _lost(self, why: str) -> None:
        if self._trouble == why:
            return
        if not self._trouble:
            self._happened("lost", time.time(), "", "the node does not answer")
            log.warning("node.lost", error=why)
        self._trouble = why
        self._rates.forget()
        self._tell({"type": "node", "node": views.node(self._seen, self._host, why)})

    def _happened(self, kind: str, at: float, pod: str, text: str) -> Event:
        event = self._timeline.add(at, kind, pod, text)
        self._tell({"type": "event", "event": views.event(event)})
        return event

    # --- the stream of changes

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        over = threading.Event()
        streams: list[Callable[[], object]] = []

        def tell(kind: str, at: float, pod: str, text: str) -> None:
            loop.call_soon_threadsafe(self._changed, kind, at, pod, text)

        def follow() -> None:
            try:
                self._node.follow(tell, streams.append)
            finally:
                streams.clear()

        def again_and_again(follow: Callable[[], None]) -> None:
            while not over.is_set():
                with contextlib.suppress(ShimError):  # the polls report the error
                    follow()
                over.wait(_LOST)

        for name, work in (("events", follow), ("actions", lambda: self._node.follow_actions(tell))):
            threading.Thread(target=again_and_again, args=(work,), name=name, daemon=True).start()
        try:
            yield
        finally:
            over.set()
            while streams:
                streams.pop()()

    def _changed(self, kind: str, at: float, pod: str, text: str) -> None:
        self._happened(kind, at, pod, text)
        self._wake.set()

    # --- messages

    def _state(self) -> Message:
        return {
            "type": "state",
            "node": views.node(self._seen, self._host, self._trouble),
            "pods": self._pods(),
            "events": [views.event(event) for event in self._timeline.newest(300)],
            "sparks": {pod: views.spark(self._graphs.samples(pod, 40)) for pod in self._graphs.pods() if pod != NODE},
            "last": {
                pod: views.rounded(last[0]) for pod in self._graphs.pods() if (last := self._graphs.samples(pod, 1))
            },
        }

    def _pods(self) -> list[dict[str, Any]]:
        known = self._seen.readings if self._seen else {}
        return [
            views.pod(pod, self._addresses.get((pod.id, pod.ready), ()), known.get(pod.id)) for pod in self._pods_seen()
        ]

    def _tell(self, message: Message) -> None:
        for listener in self._listeners:
            listener.put(message)
