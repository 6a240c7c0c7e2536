"""`virtshim exec`: a command in a guest, with this program's input and output as its own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from virtshim.cli.relay import relay
from virtshim.cli.vm_lookup import running_vm
from virtshim.cri.client import connected
from virtshim.domain.guest.streaming import Streams
from virtshim.streaming import client as streaming


def exec_command(socket: str, wanted: str, command: Sequence[str], *, stdin: bool, tty: bool) -> int:
    """The command's exit code. Raises ShimError, BrokenPipeError."""
    streams = Streams(stdin=stdin, stdout=True, stderr=not tty, tty=tty)
    with connected(socket) as node:
        url = node.exec_url(running_vm(wanted, node.pods(), node.vms()).id, command, streams)
    with contextlib.closing(streaming.connect(url)) as client:
        return relay(client, stdin=stdin, is_terminal=tty)
