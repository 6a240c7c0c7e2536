"""Records calls and their parts as spans in the caller's trace. Implements `virtshim.metrics.observed.Tracer`. Loaded only if
traces are sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from virtshim.metrics.observed import Call, Metadata, NoCall, kind_of, nothing
from virtshim.metrics.span_sender import Sending, SpanSender

_CONTEXT: Final = TraceContextTextMapPropagator()
_CARRIED: Final = frozenset(_CONTEXT.fields)
# Codes that are not the server's fault, by OpenTelemetry's conventions for gRPC.
_NO_ERRORS: Final = frozenset(
    {"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"}
    | {"FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNAUTHENTICATED"}
)


class _Traced:
    def __init__(self, span: Span) -> None:
        self._span = span
        self.trace = format_trace_id(span.get_span_context().trace_id)

    def ends(self, code: str) -> None:
        self._span.set_attribute("rpc.response.status_code", code)
        if code not in _NO_ERRORS:
            self._span.set_status(Status(StatusCode.ERROR))


class OtlpTracer:
    """Spans contain only virtshim's own words: no request, no error text, nothing from a pod. The owner must call `close`."""

    def __init__(
        self,
        service: str,
        endpoint: str,
        sampling: float,
        count: Callable[[str, int], None],
        sending: Sending | None = None,
    ) -> None:
        """`sampling`: the share of recorded traces, among those that begin here. For other traces the caller has decided."""
        sending = sending or Sending()
        is_plain = not endpoint.startswith("https://")
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=is_plain, timeout=sending.export)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sampling)),
            resource=Resource({SERVICE_NAME: service, SERVICE_VERSION: version("virtshim")}),
            span_limits=SpanLimits(max_attributes=32, max_attribute_length=256),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(SpanSender(exporter, count, sending))
        self._tracer = self._provider.get_tracer("virtshim")

    def close(self) -> None:
        self._provider.shutdown()

    @contextlib.contextmanager
    def call(self, name: str, metadata: Metadata, *, begins: bool) -> Iterator[Call]:
        carried = {key: value for key, value in metadata if key in _CARRIED and isinstance(value, str)}
        parent = _CONTEXT.extract(carried, Context())
        if not (begins or trace.get_current_span(parent).get_span_context().is_valid):
            yield NoCall()
            return
        service, _, method = name.rpartition("/")
        about = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        with self._tracer.start_as_current_span(
            name, parent, SpanKind.SERVER, about, record_exception=False, set_status_on_exception=False
        ) as span:
            yield _Traced(span) if span.is_recording() else NoCall()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not _current_is_recorded():
            yield
            return
        with self._tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False) as span:
            try:
                yield
            except BaseException as exc:
                span.set_status(Status(StatusCode.ERROR, kind_of(exc)))
                raise

    def later(self, name: str) -> Callable[[], None]:
        return self._tracer.start_span(name).end if _current_is_recorded() else nothing

    def forwarded(self, metadata: Sequence[tuple[str, str | bytes]]) -> Sequence[tuple[str, str | bytes]]:
        """`metadata` for an outgoing call that is part of the current call."""
        if not trace.get_current_span().get_span_context().is_valid:
            return metadata
        carried: dict[str, str] = {}
        _CONTEXT.inject(carried)
        return [(key, value) for key, value in metadata if key not in _CARRIED] + list(carried.items())


def _current_is_recorded() -> bool:
    return trace.get_current_span().is_recording()
