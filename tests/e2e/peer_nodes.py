"""Settings of nodes that move VMs to each other, and a node that was taken over."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from fakes.node_certificates import ClusterCa

from virtshim.peers.certificates import PeerFiles

NAMES = ("here", "there")
_TAKEN_OVER = "taken-over"
_HEAD = struct.Struct("!cI")
_COUNT = struct.Struct("!Q")


class PeerNodes:
    """One cluster's CA, and a port for each of its nodes."""

    def __init__(self, directory: str) -> None:
        place = Path(directory) / "peers"
        place.mkdir()
        self._ca = ClusterCa(place)
        self._ports = {name: free_port() for name in (*NAMES, _TAKEN_OVER)}

    def settings(self, name: str) -> str:
        files = self._ca.node(name)
        addresses = ", ".join(f'{one} = "127.0.0.1:{port}"' for one, port in self._ports.items())
        return (
            f'[peers]\nlisten = "127.0.0.1:{self._ports[name]}"\ncertificate = "{files.certificate}"\n'
            f'key = "{files.key}"\nca = "{files.ca}"\naddresses = {{{addresses}}}\n'
        )

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[TakenOver]:
        """It has the VMs of node `here`, as node `there` gets them."""
        node = TakenOver(
            self._ports[_TAKEN_OVER], self._ca.node(_TAKEN_OVER), self._ports["here"], self._ca.node("there")
        )
        try:
            yield node
        finally:
            node.close()


class TakenOver:
    """Relays what another node says, and changes the memory of guests: `mangle` gets each chunk of the stream and returns what is
    sent instead; the stream ends when it returns None."""

    def __init__(self, port: int, own: PeerFiles, victim: int, caller: PeerFiles) -> None:
        self.mangle: Callable[[bytes], bytes | None] = bytes
        self._victim = victim
        self._server, self._client = (ssl.SSLContext(one) for one in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        self._client.check_hostname, self._client.verify_mode = False, ssl.CERT_NONE
        self._server.load_cert_chain(own.certificate, own.key)
        self._client.load_cert_chain(caller.certificate, caller.key)
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            self._server.wrap_socket(connected, server_side=True) as caller,
            self._client.wrap_socket(socket.create_connection(("127.0.0.1", self._victim))) as victim,
        ):
            asked, answered = bytearray(), _Frames(self.mangle)
            while True:
                if data := _read(caller, victim):
                    asked += data[: 1 << 10]
                    answered.are_memory = asked[_HEAD.size :].startswith(b'{"do": "memory"')
                    victim.sendall(data)
                if data := _read(victim, caller):
                    caller.sendall(answered.changed(data))


def _read(one: ssl.SSLSocket, other: ssl.SSLSocket) -> bytes:
    """Empty if there is nothing yet. Raises ConnectionError at the end."""
    if not one.pending() and not other.pending():
        select.select([one, other], [], [], 60)
    one.settimeout(0)
    try:
        data = one.recv(1 << 16)
    except ssl.SSLWantReadError:
        return b""
    finally:
        one.settimeout(60)
    if not data:
        raise ConnectionResetError
    return data


class _Frames:
    """The stream of frames of one connection."""

    def __init__(self, mangle: Callable[[bytes], bytes | None]) -> None:
        self.are_memory = False
        self._mangle = mangle
        self._read = bytearray()
        self._sent = 0
        self._is_cut = False

    def changed(self, data: bytes) -> bytes:
        self._read += data
        changed = bytearray()
        while len(self._read) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._read)
            if len(self._read) < _HEAD.size + size:
                break
            content = bytes(self._read[_HEAD.size : _HEAD.size + size])
            del self._read[: _HEAD.size + size]
            if not self.are_memory or kind not in b"CZ":
                changed += _HEAD.pack(kind, size) + content
            elif not self._is_cut:
                changed += self._memory(None if kind == b"Z" else self._mangle(content))
        return bytes(changed)

    def _memory(self, content: bytes | None) -> bytes:
        if content is None:
            self._is_cut = True
            return _HEAD.pack(b"Z", _COUNT.size) + _COUNT.pack(self._sent)
        self._sent += len(content)
        return _HEAD.pack(b"C", len(content)) + content


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
