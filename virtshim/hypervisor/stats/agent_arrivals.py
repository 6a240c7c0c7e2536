"""How long guests take from their start until their agent first answers."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

from virtshim.primitives import observed
from virtshim.primitives.observed import Step


class AgentArrivals:
    """A guest that has no agent is forgotten when it ends. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: dict[uuid.UUID, tuple[float, Callable[[], None]]] = {}

    def begin(self, domain: uuid.UUID) -> None:
        with self._lock:
            self._awaited[domain] = time.monotonic(), observed.tracer().later(Step.AGENT.value)

    def arrived(self, domain: uuid.UUID) -> None:
        """Once for each start: the guest may be restarted, or its agent."""
        with self._lock:
            awaited = self._awaited.pop(domain, None)
        if awaited is not None:
            began, ended = awaited
            ended()
            observed.meter().took(Step.AGENT, observed.OK, time.monotonic() - began)

    def forget(self, domain: uuid.UUID) -> None:
        with self._lock:
            self._awaited.pop(domain, None)
