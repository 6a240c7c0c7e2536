"""The screens of VMs: connections to the VNC sockets that their QEMUs made. Implements `virtshim.ports.streaming.Screens`.

While a VM starts, the directory of its VNC socket is QEMU's own, so that something else may be under that name ever after.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

import structlog

from virtshim.domain.errors import Unavailable
from virtshim.domain.ids import ContainerId
from virtshim.domain.layout import Layout, vnc_socket
from virtshim.unix_peer import NotThePeer, connect_to

log = structlog.get_logger(__name__)

# Seconds for a QEMU that serves another client's handshake.
_CONNECT: Final = 5


class ScreenSockets:
    def __init__(self, layout: Layout, qemu_of: Callable[[ContainerId], int | None]) -> None:
        """`qemu_of`: the process id of the container's QEMU, None if there is none."""
        self._layout = layout
        self._qemu_of = qemu_of

    def connect(self, container: ContainerId) -> socket.socket:
        pid = self._qemu_of(container)
        if pid is None:
            raise Unavailable("the VM has ended")
        try:
            return connect_to(vnc_socket(self._layout, container), pid, _CONNECT)
        except NotThePeer as exc:
            log.warning("security.foreign_screen", container=container.short, error=str(exc))
            raise Unavailable(f"its screen's socket was replaced: {exc}") from exc
        except OSError as exc:
            raise Unavailable(f"its screen: {(exc.strerror or str(exc)).lower()}") from exc
