"""Connects to the programs that serve a VM's devices, because QEMU itself may not connect to anything.

libvirt names their sockets on the command line: virtiofsd's for volumes, swtpm's for a TPM.
"""

from __future__ import annotations

import itertools
import os
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def call_servers(argv: Sequence[str]) -> list[str]:
    """Returns `argv` with each socket's path replaced by a connected descriptor, which exec keeps. Raises OSError with the
    path."""
    called = list(argv)
    for at, (option, value) in enumerate(itertools.pairwise(argv), start=1):
        fields = value.replace(",,", "\0").split(",")
        if option == "-chardev" and _is_client(fields):
            called[at] = ",".join(_called(field) for field in fields if not _calls_again(field)).replace("\0", ",,")
    return called


def _is_client(fields: Sequence[str]) -> bool:
    return fields[0] == "socket" and not any(field in ("server", "server=on", "server=yes") for field in fields)


def _calls_again(field: str) -> bool:
    """Whether this is the option to reconnect, which QEMU could not do, and does not accept together with a descriptor."""
    return field.partition("=")[0] in ("reconnect", "reconnect-ms")


def _called(field: str) -> str:
    name, _, path = field.partition("=")
    return f"fd={_connected(path.replace(chr(0), ','))}" if name == "path" else field


def _connected(path: str) -> int:
    """Not closed after a failure, because then this process ends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror or str(exc), path) from exc
    os.set_inheritable(connection.fileno(), True)
    return connection.detach()
