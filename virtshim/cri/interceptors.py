"""Around every call: on whose threads it runs, log context, timing, and the mapping of errors to gRPC codes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
import structlog

from virtshim.cri.error_codes import GRPC_CODES, on_the_wire
from virtshim.domain.errors import Kind, ShimError

if TYPE_CHECKING:
    # The stubs make the handler generic for the checker only.
    _Handler = grpc.RpcMethodHandler[Any, Any]
else:
    _Handler = grpc.RpcMethodHandler

log = structlog.get_logger(__name__)

_Call = Callable[[Any, grpc.ServicerContext], Any]

# kubelet asks these every second or so, and they are answered from memory. A line for each would drown the log; and a node whose
# Status has to wait for stops, hooks or pulls to end is taken for dead, so they have threads of their own.
_FREQUENT: Final = frozenset(
    {
        "Version",
        "Status",
        "ListPodSandbox",
        "ListContainers",
        "PodSandboxStatus",
        "ContainerStatus",
        "ImageStatus",
        "ListImages",
    }
    | {"ImageFsInfo", "RuntimeConfig", "StreamPodSandboxes", "StreamContainers", "StreamImages"}
    | {"ListContainerStats", "ListPodSandboxStats", "ListPodSandboxMetrics"}
    | {"StreamContainerStats", "StreamPodSandboxStats", "StreamPodSandboxMetrics"}
)


class CallInterceptor(grpc.ServerInterceptor):
    """Requests are never logged: they hold secrets."""

    def __init__(self, frequent: ThreadPoolExecutor) -> None:
        """`frequent`: the threads of the calls that kubelet repeats all the time."""
        self._frequent = frequent

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.rpartition("/")[2]
        if handler.unary_unary is None:
            assert handler.unary_stream is not None  # CRI has no streams towards the server
            return grpc.unary_stream_rpc_method_handler(
                self._placed(method, _guarded_stream(method, handler.unary_stream)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._placed(method, _guarded(method, handler.unary_unary)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _placed(self, method: str, call: _Call) -> _Call:
        """The attribute is gRPC's way to say where a method runs; without it that is the server's own pool."""
        if method in _FREQUENT:
            call.experimental_thread_pool = self._frequent  # type: ignore[attr-defined]
        return call


def _guarded(method: str, inner: _Call) -> _Call:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        with _watched(method, context):
            return inner(request, context)

    return call


def _guarded_stream(
    method: str, inner: Callable[[Any, grpc.ServicerContext], Iterator[Any]]
) -> Callable[[Any, grpc.ServicerContext], Iterator[Any]]:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _watched(method, context):
            yield from inner(request, context)

    return call


@contextmanager
def _watched(method: str, context: grpc.ServicerContext) -> Iterator[None]:
    with structlog.contextvars.bound_contextvars(rpc=method):
        started = time.monotonic()
        try:
            yield
        except ShimError as exc:
            log.warning("rpc.failed", kind=exc.kind.value, error=str(exc), ms=_ms(started))
            _abort(context, exc.kind, str(exc))
        except NotImplementedError:
            _abort(context, Kind.UNIMPLEMENTED, f"virtshim does not implement {method} yet")
        except Exception:
            log.exception("rpc.crashed", ms=_ms(started))
            _abort(context, Kind.INTERNAL, f"virtshim failed in {method}; its log has the details")
        if method not in _FREQUENT:
            log.info("rpc.done", ms=_ms(started))


def _ms(started: float) -> float:
    return round((time.monotonic() - started) * 1000, 1)


def _abort(context: grpc.ServicerContext, kind: Kind, message: str) -> NoReturn:
    context.abort(GRPC_CODES[kind], on_the_wire(message))
