"""`virtshim port-forward` leads ports of this machine to ports of a VM, as `kubectl port-forward` does.

Each client gets its own stream of the node. It reaches the guest from the pod's network, or inside the guest
(`virtshim.io/forward: agent`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.cli import terminal
from virtshim.cli.vm_lookup import running_vm
from virtshim.cli.vnc import ListenAddress, accepted, copy_both_ways, listen_at
from virtshim.cri.client import connected
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.streaming import client as streaming

_PORTS: Final = re.compile(r"(?:(?P<here>[0-9]{0,5}):)?(?P<there>[0-9]{1,5})")
_HIGHEST: Final = 65535


@dataclass(frozen=True, slots=True)
class Forward:
    """`here`: 0 for a free port."""

    here: int
    there: int


def parse_forwards(words: Sequence[str], address: str) -> tuple[str, list[Forward]]:
    """The address, and each of the words `80`, `8080:80` and `:80`. Raises InvalidRequest."""
    try:
        host = str(ipaddress.ip_address(address))
    except ValueError as exc:
        raise InvalidRequest(f"--address {address[:80]!r}: must be an IP address of this machine") from exc
    found = []
    for word in words:
        ports = _PORTS.fullmatch(word)
        there = int(ports["there"]) if ports else 0
        here = there if ports and ports["here"] is None else int((ports and ports["here"]) or 0)
        if not 0 < there <= _HIGHEST or here > _HIGHEST:
            raise InvalidRequest(f"{word[:80]!r} names no ports; write PORT, LOCAL:PORT or :PORT, such as 8080:80")
        found.append(Forward(here, there))
    return host, found


def port_forward(cri_socket: str, wanted: str, address: str, forwards: Sequence[Forward]) -> None:
    """Serves clients until Ctrl-C. Raises ShimError."""
    with connected(cri_socket) as node:
        vm = running_vm(wanted, node.pods(), node.vms())
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(listen_at(ListenAddress(address, one.here), "choose another port or --address"))
            for one in forwards
        ]
        try:
            with terminal.ended_by_signals():
                for listener, one in zip(listeners, forwards, strict=True):
                    shown = "{}:{}".format(*listener.getsockname()[:2])
                    _say(f"{shown} leads to port {one.there} of {wanted} ({vm.id[:12]})")
                    serving = (cri_socket, vm.pod, one.there, listener)
                    threading.Thread(target=_accept, args=serving, daemon=True).start()
                _say("Ctrl-C ends")
                threading.Event().wait()
        except KeyboardInterrupt:
            return


def _accept(cri_socket: str, pod: str, port: int, listener: socket.socket) -> None:
    for local in accepted(listener):
        threading.Thread(target=_serve, args=(cri_socket, pod, port, local), daemon=True).start()


def _serve(cri_socket: str, pod: str, port: int, local: socket.socket) -> None:
    """Serves one client, on its own thread."""
    with local, contextlib.suppress(OSError):
        try:
            with connected(cri_socket) as node:
                url = node.forward_url(pod, port)
            with contextlib.closing(streaming.connect(url, streaming.FORWARD)) as remote:
                copy_both_ways(local, remote)
        except ShimError as exc:
            _say(str(exc))


def _say(text: str) -> None:
    print(f"port-forward: {text}", file=sys.stderr, flush=True)
