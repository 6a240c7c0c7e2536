"""Connects to other nodes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator, Mapping

from virtshim.model.errors import InvalidRequest, PermissionRefused, Unavailable
from virtshim.model.text import PEER_PORT, host_and_port, is_node_name
from virtshim.peers.certificates import PeerCertificates, PeerFiles, named_node, reason
from virtshim.peers.link import TlsLink
from virtshim.peers.ports import PeerLink
from virtshim.system.live import Live


class PeerClient:
    """Implements `virtshim.peers.ports.Peers`. `addresses`: by the nodes' names, as in the settings."""

    def __init__(self, files: PeerFiles, addresses: Live[Mapping[str, str]]) -> None:
        self._certificates = PeerCertificates(files)
        self._addresses = addresses

    def check(self) -> None:
        self._certificates.check()

    @contextlib.contextmanager
    def connect(self, node: str, timeout: float) -> Iterator[PeerLink]:
        if not is_node_name(node):
            raise InvalidRequest(f"{node[:80]!r} is not the name of a node; kubectl get nodes lists them")
        own, until = self._certificates.current(), time.monotonic() + timeout
        host, port = host_and_port(self._addresses.now.get(node, node), PEER_PORT)
        where = f"{host} port {port}"
        with contextlib.ExitStack() as stack:
            try:
                connected = stack.enter_context(socket.create_connection((host, port), timeout=_left(until)))
                link = TlsLink(connected, own.client, is_server=False)
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


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
