"""Limits the sessions of each pod: their number, forwarded connections, and bytes that the guest has not read yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from virtshim.model.errors import ResourceExhausted
from virtshim.streaming.channel import PIECE, Pipe
from virtshim.streaming.portforward import ForwardFailed
from virtshim.system.pod_places import Places, PodPlaces

# Bytes at a time for an empty stream when its pod has reached its limit, so that it continues slowly.
_LITTLE: Final = 16 << 10
# Bytes that each pod may always hold, even if the others use up the node's.
_SURE: Final = 512 << 10


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of a pod and of the node. `bytes`: those that clients have sent and guests have not read."""

    pod_sessions: int = 64
    sessions: int = 512
    pod_connections: int = 128
    connections: int = 1024
    pod_bytes: int = 8 << 20
    bytes: int = 64 << 20


def _sessions(limits: StreamLimits) -> Places:
    return Places(
        "sessions of exec, attach and port-forward",
        limits.sessions,
        limits.pod_sessions,
        "end some, or raise streaming.pod_sessions",
        "end some, or raise streaming.sessions",
    )


def _connections(limits: StreamLimits) -> Places:
    return Places(
        "forwarded connections",
        limits.connections,
        limits.pod_connections,
        "close some, or raise streaming.pod_connections",
        "close some",
    )


class StreamRoom:
    """Counts what all sessions of the node use. Used on the streaming loop, except `sessions` and `connections`."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.sessions = PodPlaces(_sessions(limits))
        self.connections = PodPlaces(_connections(limits))
        self._held: Counter[str] = Counter()
        self._total = 0
        self._waiting: set[asyncio.Event] = set()

    def allow(self, limits: StreamLimits) -> None:
        """Changes the limits for new sessions and bytes. Any thread may call it."""
        self._limits = limits
        self.sessions.allow(_sessions(limits))
        self.connections.allow(_connections(limits))

    @contextlib.contextmanager
    def session(self, pod: str) -> Iterator[SessionRoom]:
        """Raises ResourceExhausted."""
        with self.sessions.held(pod):
            room = SessionRoom(self, pod)
            try:
                yield room
            finally:
                room.close()

    # --- for the sessions' bytes

    def allowed(self, pod: str) -> bool:
        """Whether the pod's sessions may hold more."""
        mine = self._held.get(pod, 0)
        return mine < self._limits.pod_bytes and (mine < _SURE or self._total < self._limits.bytes)

    def hold(self, pod: str, more: int) -> None:
        """`more` may be negative."""
        self._held[pod] += more
        self._total += more
        if self._held[pod] <= 0:
            del self._held[pod]
        if more < 0 and self._waiting:
            waiting, self._waiting = self._waiting, set()
            for event in waiting:
                event.set()

    def wait(self, event: asyncio.Event) -> None:
        """Sets the event when bytes are released."""
        self._waiting.add(event)


class SessionRoom:
    """The limits of one session. Implements `channel.ByteRoom`."""

    def __init__(self, node: StreamRoom, pod: str) -> None:
        self._node = node
        self._pod = pod
        self._held = 0
        self._closed = False

    def pipe(self) -> Pipe:
        return Pipe(self)

    @contextlib.contextmanager
    def connection(self) -> Iterator[None]:
        """Takes a place for a forwarded connection. Raises ForwardFailed."""
        with contextlib.ExitStack() as place:
            try:
                place.enter_context(self._node.connections.held(self._pod))
            except ResourceExhausted as exc:
                raise ForwardFailed(str(exc)) from exc
            yield

    def close(self) -> None:
        """Releases what its pipes still hold."""
        self._node.hold(self._pod, -self._held)
        self._held, self._closed = 0, True

    # --- channel.ByteRoom

    def allowed(self, mine: int) -> int:
        if self._node.allowed(self._pod):
            return PIECE
        return 0 if mine else _LITTLE

    def hold(self, more: int) -> None:
        if not self._closed and more:
            self._held += more
            self._node.hold(self._pod, more)

    def wait(self, event: asyncio.Event) -> None:
        self._node.wait(event)
