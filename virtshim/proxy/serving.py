"""The proxy's life: lock, runtimes, socket, stop. It holds nothing that a runtime does not know: killed, it loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog
from grpc import aio

from tapmanager import thread_dump
from virtshim import sdnotify
from virtshim.grpc_socket import SocketLock, listen
from virtshim.proxy.backend import MESSAGE_BYTES, Backend
from virtshim.proxy.dispatch import Dispatch
from virtshim.proxy.front import Front
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.measuring import ProxyMeter, Uncounted, Unforwarded
from virtshim.proxy.owed import Owed
from virtshim.proxy.routes import Routes

if TYPE_CHECKING:
    from virtshim.telemetry.metrics_server import MetricsServer
    from virtshim.telemetry.tracing import OtlpTracer

log = structlog.get_logger(__name__)

# For calls under way when it is told to stop. kubelet repeats what is cut off.
_DRAIN: Final = 2.0
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the settings say."""

    socket: str
    directory: str
    """For what outlives a start: the last known pods of runtimes that may be down."""
    routes: Routes
    patience: float
    """Seconds that a runtime may take for an answer that is merged with others."""
    max_calls: int
    metrics_address: str = ""
    """Where its `/metrics` is served; "" for nowhere."""
    traces: str = ""
    """The collector of its spans; "" for none."""
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
    owed = Owed(plan.directory, plan.patience)
    dispatch = Dispatch(plan.routes, backends, last_known, owed, plan.patience)
    server = aio.server(options=_OPTIONS, maximum_concurrent_rpcs=plan.max_calls)
    server.add_generic_rpc_handlers((Front(dispatch, meter, tracer),))
    metrics.start()
    try:
        await dispatch.node.check_drivers()
        listen(server, plan.socket)
        await server.start()
        owed.pay(backends)
        log.info("proxy.serving", socket=plan.socket, runtimes=[one.name for one in plan.routes.runtimes])
        sdnotify.notify("READY=1", "STATUS=serving")
        await _wait(stopping)
        sdnotify.notify("STOPPING=1")
    finally:
        await server.stop(_DRAIN)
        await owed.close()
        await last_known.saved()
        for backend in backends:
            await backend.close()
        await asyncio.to_thread(metrics.stop)
        await asyncio.to_thread(tracer.close)


class _NoServer:
    def start(self) -> None: ...

    def stop(self) -> None: ...


class _NoTraces(Unforwarded):
    def close(self) -> None: ...


def _tracer(plan: Plan, meter: ProxyMeter) -> OtlpTracer | _NoTraces:
    if not plan.traces:
        return _NoTraces()
    from virtshim.telemetry.tracing import OtlpTracer

    return OtlpTracer("virtshim-proxy", plan.traces, plan.sampling, meter.spans)


def _meter(address: str, backends: Sequence[Backend]) -> tuple[ProxyMeter, MetricsServer | _NoServer]:
    """Who counts, and who tells it. Nothing is loaded for it without an address. `backends`: as they are when it is asked."""
    if not address:
        return Uncounted(), _NoServer()
    from virtshim.telemetry.metrics_server import MetricsServer
    from virtshim.telemetry.proxy_recorder import ProxyRecorder
    from virtshim.telemetry.registry import process_registry, renderer

    registry = process_registry()
    recorder = ProxyRecorder(registry, lambda: {one.name: not one.is_down for one in backends})
    return recorder, MetricsServer(address, renderer(registry))


async def _wait(stopping: asyncio.Event) -> None:
    """Feeds systemd's watchdog from the loop that serves; a stuck one stops feeding it."""
    interval = sdnotify.watchdog_interval()
    while not stopping.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval / 2 if interval else None):
                await stopping.wait()
        sdnotify.notify("WATCHDOG=1")
