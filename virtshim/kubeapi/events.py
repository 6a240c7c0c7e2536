"""Sends Events of pods to the API server, from a separate thread."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import structlog

from virtshim.kubeapi.asking import ask
from virtshim.kubeapi.event_document import event_document
from virtshim.kubeapi.kubeconfig import access
from virtshim.kubeapi.ports import PodEvent
from virtshim.model.errors import InvalidRequest
from virtshim.system.clock import Clock
from virtshim.system.rate_limits import TokenBucket, TroubleLog
from virtshim.system.threads import lasting

log = structlog.get_logger(__name__)

# The queue's length. A full queue drops its oldest Event.
_MAX_WAITING: Final = 256
# Each pod's rate limit: Events at once, then Events per second. A flapping guest must not fill the cluster's store.
_BURST: Final = 10
_RATE: Final = 1 / 60
# The number of pods whose rates are kept.
_PODS: Final = 1024
# Seconds: between two attempts to send, and until an Event is given up.
_RETRY_AFTER: Final = 10.0
_GIVE_UP_AFTER: Final = 600.0
_JOIN_LIMIT: Final = 1.0
# The key for troubles of the queue.
_QUEUE: Final = "queue"
EVENTS_GUIDE: Final = "docs/security.md, Events of pods"

_EXISTS: Final = 409
# The server limits requests, or has a temporary fault.
_RETRYABLE: Final = (429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """`until`: by the monotonic clock. The Event's name stays the same, so a repeated attempt creates no second Event."""

    event: dict[str, Any]
    until: float


class KubeEvents:
    """Implements `virtshim.kubeapi.ports.PodEvents`. Reads the kubeconfig at each attempt, as KubeObjects does. Thread-safe."""

    def __init__(self, kubeconfig: str, clock: Clock) -> None:
        """`kubeconfig`: "" to send no Events."""
        self._kubeconfig = kubeconfig
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque(maxlen=_MAX_WAITING)
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures = TroubleLog(log, over="events.sent_again")
        self._floods = TroubleLog(log, over="events.pod_tells_again")

    def use(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig

    def tell(self, event: PodEvent) -> None:
        if not self._kubeconfig:
            return
        now = self._clock.monotonic()
        with self._lock:
            if self._closing.is_set():
                return
            if not self._has_room(event.pod.uid, now):
                self._floods.met("events.too_many", key=event.pod.uid, pod=str(event.pod.name), reason=event.reason)
                return
            self._floods.over(key=event.pod.uid)
            if len(self._waiting) == _MAX_WAITING:
                self._failures.met(
                    "events.dropped", key=_QUEUE, waiting=_MAX_WAITING, why="the API server does not accept them"
                )
            self._waiting.append(_Waiting(_document(event), now + _GIVE_UP_AFTER))
            if self._thread is None:
                try:
                    self._thread = lasting(self._run, "events")
                except RuntimeError as exc:  # the next `tell` starts the thread
                    log.warning("events.wait", error=str(exc))
        self._news.set()

    def close(self) -> None:
        """Drops the waiting Events. Waits only briefly for a request that is being sent."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        self._news.set()
        if thread is not None:
            thread.join(_JOIN_LIMIT)

    def _has_room(self, pod: str, now: float) -> bool:
        """The caller holds the lock."""
        bucket = self._buckets.setdefault(pod, TokenBucket(_RATE, _BURST - 1, now))
        self._buckets.move_to_end(pod)
        if len(self._buckets) > _PODS:
            gone, _ = self._buckets.popitem(last=False)
            self._floods.over(key=gone)
        if bucket.wait(now):
            return False
        bucket.spend(1, now)
        return True

    # --- below: the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            self._news.wait()
            self._news.clear()
            while not self._closing.is_set() and (first := self._first()) is not None:
                try:
                    is_done = self._send(first)
                except Exception:  # the thread must survive, to send the next Event
                    log.exception("events.broken")
                    is_done = True
                if is_done or self._clock.monotonic() >= first.until:
                    self._drop(first)
                else:
                    self._clock.wait(self._closing, _RETRY_AFTER)

    def _first(self) -> _Waiting | None:
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def _drop(self, sent: _Waiting) -> None:
        """A full queue may already have dropped the Event."""
        with self._lock:
            if self._waiting and self._waiting[0] is sent:
                self._waiting.popleft()

    def _send(self, one: _Waiting) -> bool:
        """False if the Event must be sent again."""
        kubeconfig = self._kubeconfig
        if not kubeconfig:
            return True
        path = f"/api/v1/namespaces/{quote(one.event['metadata']['namespace'], safe='')}/events"
        try:
            answer = ask(access(kubeconfig, verified=True), "POST", path, one.event)
        except (OSError, ValueError, InvalidRequest) as exc:
            why = " ".join(str(exc).split())[:300]
            self._failures.met("events.unsent", error=why, remedy=f"see kubernetes.kubeconfig ({kubeconfig})")
            return False
        if answer.status in (200, 201, _EXISTS):
            self._failures.over()
            self._failures.over(key=_QUEUE)
            return True
        why = f"the API server answers {answer.status} {answer.reason}"
        remedy = f"grant its user the right to create events: {EVENTS_GUIDE}"
        self._failures.met("events.unsent", error=why, remedy=remedy if answer.status in (401, 403) else "see its log")
        return answer.status not in _RETRYABLE


def _document(event: PodEvent) -> dict[str, Any]:
    pod = event.pod
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
    found = event_document(about, event.reason, event.message, event.at / 1e9, "virtshim", is_warning=event.is_warning)
    found["source"]["host"] = found["reportingInstance"]
    return found
