"""`virtshim vnc`: a VM's screen on a local port or socket, for any VNC client.

Each client gets a stream of its own, by the admin socket.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import select
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Final

from virtshim.cli import terminal
from virtshim.cli.vm_lookup import running_vm
from virtshim.cri.client import VmSummary, connected
from virtshim.cri.operator.client import operating
from virtshim.domain.annotations.parse import VNC_ANNOTATION
from virtshim.domain.errors import InvalidRequest, ShimError, WrongState
from virtshim.domain.guest.streaming import VNC_PORT
from virtshim.streaming import client as streaming

_READ: Final = 32 << 10
_ADDRESS: Final = re.compile(r"\[?(?P<host>[0-9a-fA-F.:]+?)\]?:(?P<port>[0-9]{1,5})")
# Channels of the forward's one port. Each begins with the port's number, two bytes.
_DATA, _ERROR = 0, 1
_NUMBER: Final = 2


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where clients are awaited: `path` of a Unix socket, or else an address."""

    host: str = "127.0.0.1"
    port: int = VNC_PORT
    path: str = ""


def parse_listen_address(listen: str, path: str) -> ListenAddress:
    """Raises InvalidRequest. VNC has no password here, so only this machine's own people may reach it."""
    if path:
        return ListenAddress(path=os.path.abspath(path))
    found = _ADDRESS.fullmatch(listen)
    try:
        host = ipaddress.ip_address(found["host"]) if found else None
    except ValueError:
        host = None
    if found is None or host is None or int(found["port"]) > 65535:
        raise InvalidRequest(f"--listen {listen[:80]!r}: must be ADDRESS:PORT, such as 127.0.0.1:5900")
    if not host.is_loopback:
        raise InvalidRequest(
            f"--listen {listen}: a screen has no password, so it is shown on loopback only; from another machine use "
            "ssh -L"
        )
    return ListenAddress(str(host), int(found["port"]))


def vnc(cri_socket: str, admin: str, wanted: str, place: ListenAddress) -> None:
    """Serves clients until ctrl-c. Raises ShimError."""
    with connected(cri_socket) as node:
        vm = running_vm(wanted, node.pods(), node.vms())
        if not node.has_vnc(vm.pod):
            raise WrongState(f'{vm.name} has no screen; set the annotation {VNC_ANNOTATION}: "true" on its pod')
    with _listener(place) as listener:
        shown = place.path or "{}:{}".format(*listener.getsockname()[:2])
        try:
            with terminal.ended_by_signals():
                print(
                    f"vnc: the screen of {vm.name} ({vm.id[:12]}) is at {shown}; ctrl-c ends",
                    file=sys.stderr,
                    flush=True,
                )
                while True:
                    local, _ = listener.accept()
                    threading.Thread(target=_serve, args=(admin, vm, local), daemon=True).start()
        except KeyboardInterrupt:
            return
        finally:
            if place.path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(place.path)


def _listener(place: ListenAddress) -> socket.socket:
    family = socket.AF_UNIX if place.path else socket.AF_INET6 if ":" in place.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place.path or (place.host, place.port))
        listener.listen(8)
    except OSError as exc:
        listener.close()
        where = place.path or f"{place.host} port {place.port}"
        why = exc.strerror or exc  # a path that is too long has no number
        raise WrongState(f"cannot listen on {where}: {why}; choose another with --listen or --unix") from exc
    finally:
        os.umask(before)
    return listener


def _serve(admin: str, vm: VmSummary, local: socket.socket) -> None:
    """One client, on a thread of its own."""
    with local, contextlib.suppress(OSError):
        try:
            with operating(admin) as operator:
                url = operator.screen_url(vm.id)
            with contextlib.closing(streaming.connect(url, streaming.FORWARD)) as remote:
                copy_both_ways(local, remote)
        except ShimError as exc:
            print(f"vnc: {exc}", file=sys.stderr, flush=True)


def copy_both_ways(local: socket.socket, remote: streaming.StreamClient) -> None:
    """Copies both ways until one side ends. Raises OSError, ShimError."""
    failure, number = bytearray(), bytearray()
    arrived = True  # some may have come with the handshake's answer
    while True:
        for piece in remote.receive() if arrived else ():
            if piece.channel == _ERROR:
                failure += piece.data
                continue
            rest = _NUMBER - len(number)
            number += piece.data[:rest] if rest > 0 else b""
            local.sendall(piece.data[max(rest, 0) :])
        if len(failure) > _NUMBER:
            raise WrongState(failure[_NUMBER:].decode(errors="replace"))
        if remote.is_closed:
            return
        reading = [remote.fileno(), *([] if remote.pending else [local.fileno()])]
        readable, writable, _ = select.select(reading, [remote.fileno()] if remote.pending else [], [])
        if writable:
            remote.flush()
        arrived = remote.fileno() in readable
        if local.fileno() in readable:
            data = local.recv(_READ)
            if not data:
                return
            remote.send(_DATA, data)
