"""The daemon's life: lock, parts, recovery, serving, stop. VMs outlive it at every point."""

from __future__ import annotations

import gc
import os
import threading

import structlog

from virtshim import sdnotify
from virtshim.app import assembly
from virtshim.config import Settings
from virtshim.grpc_socket import SocketLock
from virtshim.stop_signals import stop_event

log = structlog.get_logger(__name__)

# Calls under way when the daemon is told to stop: a start or a removal gets this long (seconds) to be answered. A waiting
# StopContainer is cut off; kubelet repeats it.
_DRAIN = 5.0


def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. Raises ShimError if it cannot start."""
    stopping = stop_event()
    os.makedirs(os.path.dirname(settings.cri_socket), mode=0o711, exist_ok=True)
    lock = SocketLock(settings.cri_socket)
    try:
        with assembly.open_app(settings) as app:
            sdnotify.notify("STATUS=recovering")
            app.recover()
            # Modules and records live on: without them a full garbage collection does not show in a list's answer time.
            gc.freeze()
            server = app.server(settings)
            with app.watching():
                server.start()
                sdnotify.notify("READY=1", "STATUS=serving")
                _wait(stopping)
                sdnotify.notify("STOPPING=1")
                log.info("serve.stopping")
                server.stop(_DRAIN)
    finally:
        lock.release()
    log.info("serve.stopped")


def _wait(stopping: threading.Event) -> None:
    """Feeds systemd's watchdog from the main thread; a stuck interpreter stops feeding it."""
    interval = sdnotify.watchdog_interval()
    while not stopping.wait(interval / 2 if interval else None):
        sdnotify.notify("WATCHDOG=1")
