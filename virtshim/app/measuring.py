"""Starts the metrics and traces of this process. Loads none of their modules unless the settings name an address."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from virtshim.app.assembly import App
from virtshim.config.settings import Metrics, Tracing
from virtshim.metrics import observed
from virtshim.system.threads import lasting

if TYPE_CHECKING:
    from virtshim.metrics.span_sender import Sending

# When the daemon stops, a guest that is being asked gets this many more seconds.
_JOIN = 3.0


@contextlib.contextmanager
def measured(app: App, settings: Metrics) -> Iterator[None]:
    """Within the block, counts the daemon's metrics and serves them."""
    if not settings.address:
        yield
        return
    from virtshim.metrics.daemons import Recorder, process_registry, renderer
    from virtshim.metrics.guest_filesystems import GuestFilesystems
    from virtshim.metrics.metrics_server import MetricsServer
    from virtshim.metrics.node import NodeCollector, NodeReadings, Sampler

    a = app.adapters
    readings = NodeReadings(
        records=a.records,
        usage=app.services.usage,
        hypervisor=a.vm.hypervisor,
        networks=a.network.pods,
        unfinished=app.recovery.reconcile.repair_runner.unfinished,
        stores={"images": app.images.files.filesystem_usage, "containers": a.files.containers_room.filesystem_usage},
        vms=a.files.vms,
        saved_limits=app.live.saved,
        templates=app.warm.templates.kept,
        template_limit=app.live.template_bytes,
        clock=a.clock,
    )
    filesystems = GuestFilesystems(a.records, a.guest.operations, a.clock)
    registry = process_registry()
    registry.register(NodeCollector(Sampler(readings.read, a.clock), filesystems, a.clock))
    server = MetricsServer(settings.address, renderer(registry))
    stopping = threading.Event()
    with observed.measured_by(Recorder(registry)):
        server.start()
        try:
            asking = lasting(partial(filesystems.run, stopping), "guest-filesystems")
            yield
            stopping.set()
            asking.join(_JOIN)
        finally:
            stopping.set()
            server.stop()


@contextlib.contextmanager
def traced(settings: Tracing, sending: Sending | None = None) -> Iterator[None]:
    """Within the block, records the daemon's calls as spans."""
    if not settings.endpoint:
        yield
        return
    from virtshim.metrics.tracing import OtlpTracer

    def count(result: str, number: int) -> None:
        observed.meter().spans(result, number)

    with (
        contextlib.closing(OtlpTracer("virtshim", settings.endpoint, settings.sampling, count, sending)) as tracer,
        observed.traced_by(tracer),
    ):
        yield
