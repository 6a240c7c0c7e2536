"""Sends spans to a collector from a separate thread, so nobody waits for the collector. If the queue is full, spans are dropped
and counted.

This replaces the SDK's batch processor, which does not report how many spans it drops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from virtshim.system.rate_limits import TroubleLog


@dataclass(frozen=True, slots=True)
class Sending:
    """`room`: the queue's length. Seconds: `export`, the timeout for sending one batch; `last`, how long a stopping daemon waits
    for the remaining spans."""

    room: int = 4096
    export: int = 5
    last: float = 2.0


log = structlog.get_logger(__name__)

_AT_ONCE: Final = 512
# Seconds that spans wait for more spans, to be sent together.
_PAUSE: Final = 1.0

SENT, REFUSED, DROPPED = "sent", "refused", "dropped"


class SpanSender(SpanProcessor):
    def __init__(
        self, exporter: SpanExporter, count: Callable[[str, int], None], sending: Sending | None = None
    ) -> None:
        """`count`: called with a result (SENT, REFUSED or DROPPED) and the number of spans."""
        self._exporter = exporter
        self._count = count
        self._sending = sending or Sending()
        self._waiting: deque[ReadableSpan] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._trouble = TroubleLog(log, over="tracing.sent_again")
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Does nothing, because a span is sent when it has ended."""

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._changed:
            has_room = len(self._waiting) < self._sending.room
            if has_room:
                self._waiting.append(span)
                if len(self._waiting) >= _AT_ONCE:
                    self._changed.notify_all()
        if not has_room:
            self._count(DROPPED, 1)

    def shutdown(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        # If the collector hangs, so does the thread; it ends with the process.
        self._thread.join(self._sending.last)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        del timeout_millis
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or len(self._waiting) >= _AT_ONCE, _PAUSE)
                batch = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
                if self._stopping and not batch:
                    break
            if batch:
                self._send(batch)
        self._exporter.shutdown()

    def _send(self, batch: list[ReadableSpan]) -> None:
        try:
            is_sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # the thread must survive, for the next batch
            log.exception("tracing.crashed")
            is_sent = False
        self._count(SENT if is_sent else REFUSED, len(batch))
        if is_sent:
            self._trouble.over()
        else:
            self._trouble.met("tracing.not_sent", spans=len(batch))
