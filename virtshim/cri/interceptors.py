"""Wraps every call: chooses its threads, sets the log context, measures it, and maps errors to gRPC codes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
import structlog

from virtshim.cri.error_codes import GRPC_CODES, on_the_wire
from virtshim.cri.lists import encoded
from virtshim.metrics import observed
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.store.ports import Records

if TYPE_CHECKING:
    # Only the type stubs make the handler generic.
    _Handler = grpc.RpcMethodHandler[Any, Any]
else:
    _Handler = grpc.RpcMethodHandler

log = structlog.get_logger(__name__)

_Call = Callable[[Any, grpc.ServicerContext], Any]
_About = Callable[[Any], dict[str, str]]

# kubelet makes these calls about every second, and virtshim answers them from memory. They are not logged, because they would
# drown the log. They have threads of their own: if Status had to wait for stops, hooks or pulls, kubelet would take the node for
# dead.
_FREQUENT: Final = frozenset((
    "Version", "Status", "RuntimeConfig", "ListPodSandbox", "ListContainers", "ListImages", "PodSandboxStatus", "ContainerStatus",
    "ImageStatus", "ImageFsInfo", "StreamPodSandboxes", "StreamContainers", "StreamImages", "ListContainerStats",
    "ListPodSandboxStats", "ListPodSandboxMetrics", "StreamContainerStats", "StreamPodSandboxStats", "StreamPodSandboxMetrics",
))  # fmt: skip


class CallInterceptor(grpc.ServerInterceptor):
    """Never logs requests, because they hold secrets."""

    def __init__(self, frequent: ThreadPoolExecutor, about: _About = lambda _request: {}) -> None:
        """`frequent`: the threads for calls that kubelet repeats all the time. `about`: names the subject of a request,
        for the log."""
        self._frequent = frequent
        self._about = about

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.rpartition("/")[2]
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                self._placed(method, _guarded(handler_call_details.method.lstrip("/"), handler.stream_unary, _nothing)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        if handler.unary_unary is None:
            assert handler.unary_stream is not None  # no call streams both ways
            return grpc.unary_stream_rpc_method_handler(
                self._placed(method, _guarded_stream(method, handler.unary_stream)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._placed(method, _guarded(handler_call_details.method.lstrip("/"), handler.unary_unary, self._about)),
            request_deserializer=handler.request_deserializer,
            response_serializer=encoded,
        )

    def _placed(self, method: str, call: _Call) -> _Call:
        """Sets the attribute by which gRPC chooses a method's threads; without it the server's own pool runs the
        method."""
        if method in _FREQUENT:
            call.experimental_thread_pool = self._frequent  # type: ignore[attr-defined]
        return call


def _nothing(_requests: object) -> dict[str, str]:
    """A stream of requests has no subject before it is read."""
    return {}


def _guarded(service_method: str, inner: _Call, about: _About) -> _Call:
    method = service_method.rpartition("/")[2]

    def call(request: Any, context: grpc.ServicerContext) -> Any:
        metadata = context.invocation_metadata() or ()
        spanned = observed.tracer().call(service_method, metadata, begins=method not in _FREQUENT)
        with spanned as traced, _watched(method, context, traced, lambda: about(request)):
            return inner(request, context)

    return call


def _guarded_stream(
    method: str, inner: Callable[[Any, grpc.ServicerContext], Iterator[Any]]
) -> Callable[[Any, grpc.ServicerContext], Iterator[Any]]:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _watched(method, context, observed.NoCall(), dict):
            yield from inner(request, context)

    return call


@contextmanager
def _watched(
    method: str, context: grpc.ServicerContext, traced: observed.Call, about: Callable[[], dict[str, str]]
) -> Iterator[None]:
    """`about`: names the subject of the call. For calls that kubelet repeats all the time it is only used if they
    fail."""
    bound = about() if method not in _FREQUENT else {}
    if traced.trace:
        bound["trace"] = traced.trace
    with structlog.contextvars.bound_contextvars(rpc=method, **bound):
        started = time.monotonic()
        meter, code = observed.meter(), grpc.StatusCode.OK
        meter.calls_under_way(1)
        try:
            yield
        except ShimError as exc:
            code = GRPC_CODES[exc.kind]
            log.warning("rpc.failed", **about(), code=code.name, kind=exc.kind.value, error=str(exc), ms=_ms(started))
            _abort(context, code, str(exc))
        except NotImplementedError:
            code = grpc.StatusCode.UNIMPLEMENTED
            log.info("rpc.failed", code=code.name, ms=_ms(started))
            _abort(context, code, f"virtshim does not implement {method} yet")
        except GeneratorExit:  # the client of a stream has disconnected
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code = grpc.StatusCode.INTERNAL
            log.exception("rpc.crashed", **about(), code=code.name, ms=_ms(started))
            _abort(context, code, f"virtshim failed in {method}; its log has the details")
        finally:
            traced.ends(code.name)
            meter.calls_under_way(-1)
            meter.call_took(method, code.name, time.monotonic() - started)
        if method not in _FREQUENT:
            log.info("rpc.done", code=code.name, ms=_ms(started))


def _ms(started: float) -> float:
    return round((time.monotonic() - started) * 1000, 1)


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    context.abort(code, on_the_wire(message))


# The subject of a call, for the log: only names and ids, nothing else of the request.

# Length of ids in the log.
_SHORT = 20
_LONGEST = 256


def subject_of(records: Records, request: Any) -> dict[str, str]:
    """`pod`, `sandbox`, `container` and `image`, as far as they are known. `request`: any CRI message."""
    container_id, sandbox_id = _text(request, "container_id"), _text(request, "pod_sandbox_id")
    found = {"container": container_id[:_SHORT], "sandbox": sandbox_id[:_SHORT], "image": _image(request)}
    container = _known(records.containers, ContainerId, container_id)
    sandbox = container.sandbox_id if container else _parsed(SandboxId, sandbox_id)
    if container is not None:
        found["sandbox"] = container.sandbox_id.short
    pod = records.sandboxes.get(sandbox) if sandbox else None
    found["pod"] = pod.key.readable if pod else _asked_for(request)
    return {key: value[:_LONGEST] for key, value in found.items() if value}


def _known(table: Any, kind: Any, text: str) -> Any:
    parsed = _parsed(kind, text)
    return table.get(parsed) if parsed else None


def _parsed(kind: Any, text: str) -> Any:
    try:
        return kind(text) if text else None
    except InvalidRequest:
        return None


def _asked_for(request: Any) -> str:
    """The pod that a request asks for, which does not exist yet."""
    metadata = getattr(getattr(request, "config", None), "metadata", None)
    namespace = getattr(metadata, "namespace", "")
    return f"{namespace}/{metadata.name}" if metadata is not None and namespace else ""


def _image(request: Any) -> str:
    spec = getattr(request, "image", None)
    return _text(spec, "image")


def _text(message: Any, field: str) -> str:
    value = getattr(message, field, "")
    return value if isinstance(value, str) else ""
