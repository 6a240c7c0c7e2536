"""`virtshim vnc` shows a VM's screen on a local socket or port, to VNC clients of the user who started it.

Each client gets its own stream through the admin socket. A screen has no password, and every local user can connect to a
loopback port. Therefore the default is a Unix socket that only the user can open; at a port, the kernel says which user
each client belongs to.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virtshim.annotations.parse import VNC_ANNOTATION
from virtshim.cli import terminal
from virtshim.cli.vm_lookup import running_vm
from virtshim.cri.client import VmSummary, connected
from virtshim.cri.operator_client import operating
from virtshim.model.errors import InvalidRequest, ShimError, WrongState
from virtshim.streaming import client as streaming
from virtshim.streaming.ports import VNC_PORT
from virtshim.system.peers import tcp_peer_uid

_READ: Final = 32 << 10
_ADDRESS: Final = re.compile(r"\[?(?P<host>[0-9a-fA-F.:]+?)\]?:(?P<port>[0-9]{1,5})")
# The two channels of the forwarded port. Each begins with the port's number, two bytes.
_DATA, _ERROR = 0, 1
_NUMBER: Final = 2
_UID_DIGITS: Final = 10


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where clients connect: an address, or else the `path` of a Unix socket. "" means a socket in a new directory."""

    host: str = ""
    port: int = VNC_PORT
    path: str = ""


def parse_listen_address(listen: str, path: str) -> ListenAddress:
    """Raises InvalidRequest for an address that other machines can reach, because the screen has no password."""
    if path or not listen:
        return ListenAddress(path=os.path.abspath(path) if path else "")
    found = _ADDRESS.fullmatch(listen)
    try:
        host = ipaddress.ip_address(found["host"]) if found else None
    except ValueError:
        host = None
    if found is None or host is None or int(found["port"]) > 65535:
        raise InvalidRequest(f"--listen {listen[:80]!r}: must be ADDRESS:PORT, such as 127.0.0.1:5900")
    if not host.is_loopback:
        raise InvalidRequest(
            f"--listen {listen}: a screen has no password, so only loopback addresses are allowed; from another machine use "
            "ssh -L"
        )
    return ListenAddress(str(host), int(found["port"]))


def vnc(cri_socket: str, admin: str, wanted: str, place: ListenAddress) -> None:
    """Serves clients until Ctrl-C. Raises ShimError."""
    with connected(cri_socket) as node:
        vm = running_vm(wanted, node.pods(), node.vms())
        if not node.has_vnc(vm.pod):
            raise WrongState(f'{vm.name} has no screen; set the annotation {VNC_ANNOTATION}: "true" on its pod')
    with listening(place) as (listener, shown):
        try:
            with terminal.ended_by_signals():
                print(
                    f"vnc: the screen of {vm.name} ({vm.id[:12]}) is at {shown}; Ctrl-C ends",
                    file=sys.stderr,
                    flush=True,
                )
                for local in clients(listener):
                    threading.Thread(target=_serve, args=(admin, vm, local), daemon=True).start()
        except KeyboardInterrupt:
            return


def accepted(listener: socket.socket, wait: float = 1.0) -> Iterator[socket.socket]:
    """Yields each connection until the listener is closed. Continues `wait` seconds after an error, such as too many open
    files."""
    while True:
        try:
            local, _ = listener.accept()
        except OSError as exc:
            if listener.fileno() < 0 or exc.errno in (errno.EINVAL, errno.EBADF):  # closed, or shut down
                return
            print(f"a client could not be accepted: {exc.strerror}", file=sys.stderr, flush=True)
            threading.Event().wait(wait)
        else:
            yield local


def clients(listener: socket.socket) -> Iterator[socket.socket]:
    """Accepts clients of root and of the user who started this with sudo. Disconnects others before they get a byte."""
    for local in accepted(listener):
        if local.family == socket.AF_UNIX or _user_of(local) in (0, os.getuid(), _caller()):
            yield local
        else:
            local.close()
            print("vnc: refused a client of another user", file=sys.stderr, flush=True)


def _user_of(local: socket.socket) -> int | None:
    with contextlib.suppress(OSError):
        return tcp_peer_uid(local)
    return None


def _caller() -> int:
    """The user id that ran sudo, or else the one of this process."""
    said = os.environ.get("SUDO_UID", "")
    is_user = said.isascii() and said.isdigit() and len(said) <= _UID_DIGITS
    return int(said) if is_user and os.getuid() == 0 else os.getuid()


@contextlib.contextmanager
def listening(place: ListenAddress) -> Iterator[tuple[socket.socket, str]]:
    """The listening socket, and its address or path as text. Raises WrongState."""
    with contextlib.ExitStack() as stack:
        directory = ""
        if not place.host and not place.path:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="virtshim-vnc-"))
            place = ListenAddress(path=f"{directory}/screen.sock")
        listener = stack.enter_context(listen_at(place))
        if place.path:
            stack.callback(Path(place.path).unlink, missing_ok=True)
        if directory:  # last: before this, no other user can replace the socket by a link to a root file
            os.chown(place.path, _caller(), -1)
            os.chown(directory, _caller(), -1)
        yield listener, place.path or "{}:{}".format(*listener.getsockname()[:2])


def listen_at(place: ListenAddress, remedy: str = "choose another with --listen or --unix") -> socket.socket:
    """Raises WrongState."""
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
        why = exc.strerror or exc  # a path that is too long has no errno
        raise WrongState(f"cannot listen on {where}: {why}; {remedy}") from exc
    finally:
        os.umask(before)
    return listener


def _serve(admin: str, vm: VmSummary, local: socket.socket) -> None:
    """Serves one client, on its own thread."""
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
    arrived = True  # data may have come with the handshake's answer
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
