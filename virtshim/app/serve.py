"""The daemon's life: lock, parts, recovery, serving, stop. VMs outlive it at every point."""

from __future__ import annotations

import contextlib
import gc
import threading

import structlog

from tapmanager import heap, thread_dump
from virtshim.app import assembly
from virtshim.app.adapters import peer_server
from virtshim.app.measuring import measured, traced
from virtshim.app.reload import Reload
from virtshim.config.settings import Settings
from virtshim.system.daemon import notify_systemd, reload_requests, stop_event, watchdog_seconds
from virtshim.system.grpc_socket import SocketLock

log = structlog.get_logger(__name__)

# When the daemon stops, running calls get this many seconds to finish, which suffices for a start or a removal. A
# waiting StopContainer is cut off, and kubelet repeats it.
_DRAIN = 5.0

# The settings that this program uses. The other settings belong to other programs.
OWN = (
    "paths", "cri", "streaming", "libvirt", "images", "vm", "devices", "peers", "log", "metrics.address",
    "tracing", "tapmanager.socket", "shares.socket",
)  # fmt: skip


def serve(settings: Settings, file: str | None = None) -> None:
    """Runs until SIGTERM or SIGINT; SIGHUP reads `file` again. Raises ShimError if it cannot start."""
    stopping, reloads = stop_event(), reload_requests()
    lock = SocketLock(settings.cri_socket)
    thread_dump.write_when_asked(settings.cri_socket)
    try:
        with assembly.open_app(settings) as app, measured(app, settings.metrics), traced(settings.tracing):
            notify_systemd("STATUS=recovering")
            app.recover()
            # Modules and records stay for the life of the process. Freezing them keeps full garbage collections from
            # slowing lists down.
            gc.freeze()
            heap.return_freed_memory()
            server, operator, peers = (
                app.server(settings),
                app.operator_server(settings),
                peer_server(settings, app.sending.handlers),
            )
            with app.watching(), contextlib.closing(peers):
                server.start()
                operator.start()
                peers.start()
                Reload(file, settings, app.live.use, OWN).start(reloads)
                notify_systemd("READY=1", "STATUS=serving")
                _wait(stopping)
                notify_systemd("STOPPING=1")
                log.info("serve.stopping")
                operator.stop(0)
                server.stop(_DRAIN)
    finally:
        lock.release()
    log.info("serve.stopped")


def _wait(stopping: threading.Event) -> None:
    """Feeds systemd's watchdog from the main thread, so that a stuck interpreter no longer feeds it."""
    every = watchdog_seconds()
    while not stopping.wait(every):
        notify_systemd("WATCHDOG=1")
