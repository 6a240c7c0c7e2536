"""`virtshim console`: a VM's serial console in this terminal."""

from __future__ import annotations

import contextlib
import sys

from virtshim.cli.relay import Detached, relay
from virtshim.cli.vm_lookup import running_vm
from virtshim.cri.client import NodeClient, VmSummary, connected
from virtshim.domain.errors import WrongState
from virtshim.streaming import client as streaming


def console(socket: str, wanted: str) -> int:
    """0 when the user detached or the VM shut down. Raises ShimError, BrokenPipeError."""
    with connected(socket) as node:
        vm = running_vm(wanted, node.pods(), node.vms())
        url, can_type = _attached(node, vm)
    with contextlib.closing(streaming.connect(url)) as client:
        _print_status(f"connected to {vm.name} ({vm.id[:12]}); " + ("ctrl-] leaves" if can_type else "ctrl-c leaves"))
        if not can_type:
            _print_status("it takes no input: set stdin: true in the container's spec to type here")
        try:
            return relay(client, stdin=can_type, is_terminal=True, detachable=True)
        except Detached:
            client.flush()
            _print_status("detached; the VM keeps running")
            return 0


def _attached(node: NodeClient, vm: VmSummary) -> tuple[str, bool]:
    """The URL, and whether the VM takes input."""
    try:
        return node.console_url(vm.id, stdin=True), True
    except WrongState:  # made without stdin; or it has just ended, which the second call tells
        return node.console_url(vm.id, stdin=False), False


def _print_status(text: str) -> None:
    print(f"\r\nconsole: {text}\r" if sys.stderr.isatty() else f"console: {text}", file=sys.stderr, flush=True)
