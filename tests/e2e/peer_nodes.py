"""Settings of nodes that move VMs to each other."""

from __future__ import annotations

import socket
from pathlib import Path

from fakes.node_certificates import ClusterCa

NAMES = ("here", "there")


class PeerNodes:
    """One cluster's CA, and a port for each of its nodes."""

    def __init__(self, directory: str) -> None:
        place = Path(directory) / "peers"
        place.mkdir()
        self._ca = ClusterCa(place)
        self._ports = {name: free_port() for name in NAMES}

    def settings(self, name: str) -> str:
        files = self._ca.node(name)
        addresses = ", ".join(f'{one} = "127.0.0.1:{port}"' for one, port in self._ports.items())
        return (
            f'[peers]\nlisten = "127.0.0.1:{self._ports[name]}"\ncertificate = "{files.certificate}"\n'
            f'key = "{files.key}"\nca = "{files.ca}"\naddresses = {{{addresses}}}\n'
        )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
