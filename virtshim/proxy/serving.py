"""Starts, serves and stops the proxy. A kill loses nothing, because the runtimes know everything that the proxy does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc
import structlog
from grpc import aio

from tapmanager import thread_dump
from virtshim.cri.error_codes import GRPC_CODES, on_the_wire
from virtshim.metrics.observed import Call, Tracer, Untraced
from virtshim.model.errors import ShimError
from virtshim.proxy.backend import MESSAGE_BYTES, Asked, Backend, CallFailed, Metadata, StreamMetadata
from virtshim.proxy.dispatch import Dispatch
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.measuring import OTHER, ProxyMeter, Uncounted, counted
from virtshim.proxy.pending import PendingConfigs
from virtshim.proxy.routes import Routes
from virtshim.proxy.shared_pods import Adopter
from virtshim.proxy.wire import METHODS, Method, Shape
from virtshim.system.daemon import notify_systemd, watchdog_seconds
from virtshim.system.grpc_socket import SocketLock, listen

if TYPE_CHECKING:
    from virtshim.metrics.metrics_server import MetricsServer

    # Generic only in the stubs.
    _Context = aio.ServicerContext[bytes, bytes]
    _Handler = grpc.RpcMethodHandler[bytes, bytes]
else:
    _Context = aio.ServicerContext
    _Handler = grpc.RpcMethodHandler

log = structlog.get_logger(__name__)

# gRPC sends these itself on each connection.
_OF_THE_CONNECTION: Final = frozenset({"user-agent", "grpc-accept-encoding", "grpc-encoding", "grpc-timeout"})


class Front(grpc.GenericRpcHandler):
    """Takes requests and answers as bytes. Requests are never logged, because they contain secrets."""

    def __init__(self, dispatch: Dispatch, meter: ProxyMeter, tracer: Tracer) -> None:
        self._dispatch = dispatch
        self._meter = meter
        self._tracer = tracer
        self._known = {path: self._handler(method) for path, method in METHODS.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler | None:
        # Unknown names are not kept, because callers may invent them.
        return self._known.get(handler_call_details.method) or grpc.stream_stream_rpc_method_handler(
            self._unknown(handler_call_details.method)
        )

    def _handler(self, method: Method) -> _Handler:
        if method.shape in (Shape.LIST_STREAM, Shape.EVENTS):
            return grpc.unary_stream_rpc_method_handler(self._many(method))
        return grpc.unary_unary_rpc_method_handler(self._one(method))

    def _one(self, method: Method) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def call(request: bytes, context: _Context) -> bytes:
            traced = self._tracer.call(method.path.lstrip("/"), context.invocation_metadata() or (), begins=False)
            with traced as span:
                async with self._answering(method.path, method.name, context, span):
                    asked = _asked(method.path, request, context)
                    asked = dataclasses.replace(asked, metadata=self._tracer.forwarded(asked.metadata))
                    answer = await self._dispatch.one(method, asked)
            if answer.initial:
                await context.send_initial_metadata(tuple(answer.initial))
            if answer.trailing:
                context.set_trailing_metadata(tuple(answer.trailing))
            return answer.body

        return call

    def _many(self, method: Method) -> Callable[[bytes, _Context], AsyncIterator[bytes]]:
        async def call(request: bytes, context: _Context) -> AsyncIterator[bytes]:
            asked = _asked(method.path, request, context)
            async with (
                self._answering(method.path, method.name, context),
                aclosing(self._dispatch.many(method, asked)) as answers,
            ):
                async for answer in answers:
                    yield answer

        return call

    def _unknown(self, path: str) -> Callable[[AsyncIterator[bytes], _Context], AsyncIterator[bytes]]:
        async def call(requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
            metadata = StreamMetadata()
            async with self._answering(path, OTHER, context):
                first = await anext(aiter(requests), None)
                asked = _asked(path, first or b"", context)
                async with aclosing(self._dispatch.unknown(asked, _again(first, requests), metadata)) as answers:
                    async for answer in answers:
                        if metadata.initial:
                            await context.send_initial_metadata(tuple(metadata.initial))
                            metadata.initial = ()
                        yield answer
                context.set_trailing_metadata(tuple(metadata.trailing))

        return call

    @asynccontextmanager
    async def _answering(
        self, path: str, name: str, context: _Context, span: Call | None = None
    ) -> AsyncIterator[None]:
        """Wraps a call and turns its exceptions into its answer. `name` is for the metrics; streams have no `span`."""
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
        except BaseException:  # the caller has given up
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            seconds = time.monotonic() - began
            code = failed.code if failed else code
            self._meter.call_took(name, code.name, seconds, None if span is None else seconds - waits.seconds)
            if span is not None:
                span.ends(code.name)
        if failed:
            await context.abort(failed.code, failed.details, tuple(failed.trailing))


async def _again(first: bytes | None, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first is not None:
        yield first
        async for one in others:
            yield one


def _asked(path: str, request: bytes, context: _Context) -> Asked:
    remaining: float | None = context.time_remaining()
    sent: Metadata = tuple(context.invocation_metadata() or ())
    return Asked(path, request, remaining, [(key, value) for key, value in sent if key not in _OF_THE_CONNECTION])


# Seconds for running calls at the stop. kubelet repeats those that are cut off.
_DRAIN: Final = 2.0
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The proxy's settings."""

    socket: str
    directory: str
    """The directory for what outlives a restart: the last known pods of runtimes that may be down."""
    routes: Routes
    patience: float
    """Seconds for a runtime's answer that is merged with others'."""
    max_calls: int
    admin_socket: str = ""
    """The socket of this node's virtshim for its own calls, if it runs VMs in pods of the primary."""
    metrics_address: str = ""
    """The address of `/metrics`; "" for none."""
    traces: str = ""
    """The collector for spans; "" for none."""
    sampling: float = 0.0


def serve(plan: Plan, reload: Callable[[], None]) -> None:
    """Runs until SIGTERM or SIGINT; SIGHUP calls `reload`. Raises ShimError if it cannot start."""
    lock = SocketLock(plan.socket)
    os.makedirs(plan.directory, mode=0o700, exist_ok=True)
    thread_dump.write_when_asked(plan.socket)
    try:
        asyncio.run(_serve(plan, reload))
    finally:
        lock.release()
    log.info("proxy.stopped")


async def _serve(plan: Plan, reload: Callable[[], None]) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    last_known = LastKnown(plan.directory, [one.name for one in plan.routes.others if one.degraded])
    backends: list[Backend] = []
    meter, metrics = _meter(plan.metrics_address, backends)
    backends += [Backend(runtime, meter) for runtime in plan.routes.runtimes]
    tracer = _tracer(plan, meter)
    pending = PendingConfigs(plan.directory, plan.patience)
    adopter = Adopter(plan.admin_socket) if plan.routes.vms else None
    dispatch = Dispatch(plan.routes, backends, last_known, pending, plan.patience, adopter)
    server = aio.server(options=_OPTIONS, maximum_concurrent_rpcs=plan.max_calls)
    server.add_generic_rpc_handlers((Front(dispatch, meter, tracer),))
    if metrics is not None:
        metrics.start()
    try:
        await dispatch.node.check_drivers()
        listen(server, plan.socket)
        await server.start()
        pending.resume(backends)
        log.info("proxy.serving", socket=plan.socket, runtimes=[one.name for one in plan.routes.runtimes])
        notify_systemd("READY=1", "STATUS=serving")
        await _wait(stopping)
        notify_systemd("STOPPING=1")
    finally:
        await server.stop(_DRAIN)
        await pending.close()
        await last_known.saved()
        for backend in backends:
            await backend.close()
        if metrics is not None:
            await asyncio.to_thread(metrics.stop)
        await asyncio.to_thread(tracer.close)


def _tracer(plan: Plan, meter: ProxyMeter) -> Tracer:
    if not plan.traces:
        return Untraced()
    from virtshim.metrics.tracing import OtlpTracer

    return OtlpTracer("virtshim-proxy", plan.traces, plan.sampling, meter.spans)


def _meter(address: str, backends: Sequence[Backend]) -> tuple[ProxyMeter, MetricsServer | None]:
    """The meter and the server of its metrics. Without an address, loads no code for them. `backends`: read at each scrape."""
    if not address:
        return Uncounted(), None
    from virtshim.metrics.daemons import ProxyRecorder, process_registry, renderer
    from virtshim.metrics.metrics_server import MetricsServer

    registry = process_registry()
    recorder = ProxyRecorder(registry, lambda: {one.name: not one.is_down for one in backends})
    return recorder, MetricsServer(address, renderer(registry))


async def _wait(stopping: asyncio.Event) -> None:
    """Feeds systemd's watchdog from the event loop, so that systemd notices a stuck loop."""
    every = watchdog_seconds()
    while not stopping.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every):
                await stopping.wait()
        notify_systemd("WATCHDOG=1")
