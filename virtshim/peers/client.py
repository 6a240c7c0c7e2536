"""Connects to other nodes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

from virtshim.model.errors import InvalidRequest, PermissionRefused, Unavailable
from virtshim.model.text import PEER_PORT, host_and_port, is_object_name
from virtshim.peers.certificates import PeerCertificates, PeerFiles, named_node, reason
from virtshim.peers.link import TlsLink
from virtshim.peers.ports import PeerLink
from virtshim.system.live import Live
from virtshim.system.locks import LeaveOff


class PeerClient:
    """Implements `virtshim.peers.ports.Peers`. `addresses`: by the nodes' names, as in the settings."""

    def __init__(self, files: PeerFiles, addresses: Live[Mapping[str, str]]) -> None:
        self._certificates = PeerCertificates(files)
        self._addresses = addresses

    def check(self) -> None:
        self._certificates.check()

    @contextlib.contextmanager
    def connect(self, node: str, timeout: float, leave_off: LeaveOff | None = None) -> Iterator[PeerLink]:
        if not is_object_name(node):
            raise InvalidRequest(f"{node[:80]!r} is not the name of a node; kubectl get nodes lists them")
        own, until = self._certificates.current(), time.monotonic() + timeout
        host, port = host_and_port(self._addresses.now.get(node, node), PEER_PORT)
        where, leave_off = f"{host} port {port}", leave_off or LeaveOff()
        with contextlib.ExitStack() as stack:
            try:
                connected = stack.enter_context(_dialled(host, port, until, leave_off))
                link = TlsLink(connected, own.client, is_server=False)
                stack.enter_context(leave_off.calling(link.close))
                certificate = link.handshake(_left(until))
            except ssl.SSLCertVerificationError as exc:
                raise PermissionRefused(
                    f"node {node}: the certificate at {where} is not valid: {reason(exc)}; renew it, or correct peers.ca"
                ) from exc
            except OSError as exc:
                raise Unavailable(
                    f"node {node}: {where} cannot be reached: {reason(exc)}; check that virtshim listens there "
                    "(peers.listen), or name the node's address in peers.addresses"
                ) from exc
            stack.callback(link.close)
            link.peer = named_node(certificate, f"node {node} at {where}")
            if link.peer != node:  # whatever the address was
                raise PermissionRefused(
                    f"node {node}: the certificate at {where} names node {link.peer}; correct peers.addresses, DNS or the "
                    "certificate"
                )
            link.receive(_left(until))  # the peer has verified our certificate and has a place for us
            yield link


def _dialled(host: str, port: int, until: float, leave_off: LeaveOff) -> socket.socket:
    """A connected socket. A separate thread connects it, because the lookup of a name cannot be interrupted, and may take longer
    than until `until`. The thread then ends when the resolver gives up. Raises OSError."""
    found: Future[socket.socket] = Future()
    over = threading.Event()
    found.add_done_callback(lambda _: over.set())

    def dial() -> None:
        try:
            connected = socket.create_connection((host, port), timeout=_left(until))
        except (OSError, UnicodeError) as exc:
            if found.set_running_or_notify_cancel():
                found.set_exception(exc if isinstance(exc, OSError) else OSError(f"{host} is no name of a host"))
            return
        if found.set_running_or_notify_cancel():
            found.set_result(connected)
        else:
            connected.close()

    try:
        threading.Thread(target=dial, name="peer-dial", daemon=True).start()
    except RuntimeError as exc:
        raise OSError(f"no thread to connect with: {exc}") from exc
    with leave_off.calling(over.set):
        over.wait(_left(until))
    if found.cancel():
        raise TimeoutError("timed out")
    return found.result()


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
