"""The proxy's side of gRPC: methods as bytes, whatever they are called; errors as they came, or as ours are told everywhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc
import structlog
from grpc import aio

from virtshim.cri.error_codes import GRPC_CODES, on_the_wire
from virtshim.domain.errors import ShimError
from virtshim.primitives.observed import Call
from virtshim.proxy.asked import Asked
from virtshim.proxy.backend import CallFailed, Metadata, Told
from virtshim.proxy.dispatch import Dispatch
from virtshim.proxy.measuring import OTHER, ProxyMeter, ProxyTracer, counted
from virtshim.proxy.methods import METHODS, Method, Shape

if TYPE_CHECKING:
    # The stubs make these generic for the checker only.
    _Context = aio.ServicerContext[bytes, bytes]
    _Handler = grpc.RpcMethodHandler[bytes, bytes]
else:
    _Context = aio.ServicerContext
    _Handler = grpc.RpcMethodHandler

log = structlog.get_logger(__name__)

# gRPC says these itself, for each connection.
_OF_THE_CONNECTION: Final = frozenset({"user-agent", "grpc-accept-encoding", "grpc-encoding", "grpc-timeout"})
_STREAMED: Final = (Shape.LIST_STREAM, Shape.EVENTS)


class Front(grpc.GenericRpcHandler):
    """For one server. Requests are never logged: they hold secrets."""

    def __init__(self, dispatch: Dispatch, meter: ProxyMeter, tracer: ProxyTracer) -> None:
        self._dispatch = dispatch
        self._told = _Told(meter, tracer)
        self._known = {path: self._handler(method) for path, method in METHODS.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler | None:
        # What a caller makes up is not kept.
        return self._known.get(handler_call_details.method) or grpc.stream_stream_rpc_method_handler(
            _unknown(self._dispatch, handler_call_details.method, self._told)
        )

    def _handler(self, method: Method) -> _Handler:
        if method.shape in _STREAMED:
            return grpc.unary_stream_rpc_method_handler(_many(self._dispatch, method, self._told))
        return grpc.unary_unary_rpc_method_handler(_one(self._dispatch, method, self._told))


def _one(dispatch: Dispatch, method: Method, told: _Told) -> Callable[[bytes, _Context], Awaitable[bytes]]:
    async def call(request: bytes, context: _Context) -> bytes:
        traced = told.tracer.call(method.path.lstrip("/"), context.invocation_metadata() or (), begins=False)
        with traced as span:
            async with told.of(method.path, method.name, context, span):
                asked = _asked(method.path, request, context)
                asked = dataclasses.replace(asked, metadata=told.tracer.forwarded(asked.metadata))
                answer = await dispatch.one(method, asked)
        if answer.initial:
            await context.send_initial_metadata(tuple(answer.initial))
        if answer.trailing:
            context.set_trailing_metadata(tuple(answer.trailing))
        return answer.body

    return call


def _many(dispatch: Dispatch, method: Method, told: _Told) -> Callable[[bytes, _Context], AsyncIterator[bytes]]:
    async def call(request: bytes, context: _Context) -> AsyncIterator[bytes]:
        asked = _asked(method.path, request, context)
        async with told.of(method.path, method.name, context), aclosing(dispatch.many(method, asked)) as answers:
            async for answer in answers:
                yield answer

    return call


def _unknown(
    dispatch: Dispatch, path: str, around: _Told
) -> Callable[[AsyncIterator[bytes], _Context], AsyncIterator[bytes]]:
    async def call(requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        told = Told()
        async with around.of(path, OTHER, context):
            first = await anext(aiter(requests), None)
            asked = _asked(path, first or b"", context)
            async with aclosing(dispatch.unknown(asked, _again(first, requests), told)) as answers:
                async for answer in answers:
                    if told.initial:
                        await context.send_initial_metadata(tuple(told.initial))
                        told.initial = ()
                    yield answer
            context.set_trailing_metadata(tuple(told.trailing))

    return call


async def _again(first: bytes | None, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first is not None:
        yield first
        async for one in others:
            yield one


def _asked(path: str, request: bytes, context: _Context) -> Asked:
    remaining: float | None = context.time_remaining()
    sent: Metadata = tuple(context.invocation_metadata() or ())
    return Asked(path, request, remaining, [(key, value) for key, value in sent if key not in _OF_THE_CONNECTION])


@dataclass(frozen=True, slots=True)
class _Told:
    meter: ProxyMeter
    tracer: ProxyTracer

    @asynccontextmanager
    async def of(self, path: str, name: str, context: _Context, span: Call | None = None) -> AsyncIterator[None]:
        """Around a call: what it raises is its answer. `name` is what it is counted as; a stream has no `span`."""
        began, waits = time.monotonic(), counted()
        failed: CallFailed | None = None
        code = grpc.StatusCode.OK
        try:
            yield
        except CallFailed as exc:
            failed = exc
        except ShimError as exc:
            log.warning("proxy.refused", rpc=path, kind=exc.kind.value, error=str(exc))
            failed = CallFailed(GRPC_CODES[exc.kind], on_the_wire(str(exc)))
        except Exception:
            log.exception("proxy.crashed", rpc=path)
            failed = CallFailed(grpc.StatusCode.INTERNAL, "the proxy failed; its log has the details")
        except BaseException:  # its caller has given it up
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            seconds = time.monotonic() - began
            code = failed.code if failed else code
            self.meter.call_took(name, code.name, seconds, None if span is None else seconds - waits.seconds)
            if span is not None:
                span.ends(code.name)
        if failed:
            await context.abort(failed.code, failed.details, tuple(failed.trailing))
