"""`virtshim exec`, `virtshim console` and `virtshim ssh`: sessions in a VM.

exec and console connect this program's standard streams to a stream of the node. ssh runs ssh(1) to the address that CNI
gave the pod.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virtshim.cli import terminal
from virtshim.cli.vm_lookup import running_vm
from virtshim.cri.client import NodeClient, VmSummary, connected
from virtshim.guest.login import check_user, parse_keys
from virtshim.model.errors import InternalError, InvalidRequest, Unavailable, WrongState
from virtshim.streaming import client as streaming
from virtshim.streaming.client import ERROR, RESIZE, STDERR, STDIN, STDOUT, StreamClient
from virtshim.streaming.ports import Streams
from virtshim.streaming.remotecommand_status import Exited, Failed, Outcome, from_status

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_READ: Final = 32 << 10
_OUT: Final = {STDOUT: _OUTPUT, STDERR: _ERRORS}

DETACH: Final = b"\x1d"  # ctrl-]


class Detached(Exception):
    """The user typed ctrl-]."""


def relay(
    client: StreamClient, *, stdin: bool, is_terminal: bool, detachable: bool = False, endless: bool = False
) -> int:
    """Connects this program's input and output to `client` until the stream ends or the user detaches. Returns the exit code.
    Raises ShimError if the session failed, Detached, and BrokenPipeError if nobody reads the output. `is_terminal`: the other
    side is a terminal, and gets the size of this one. `endless`: the other side does not learn that this program's input has
    ended. The same holds if the user can detach."""
    with terminal.resizes() as resized, terminal.raw(_INPUT) if is_terminal and stdin else nullcontext():
        if is_terminal:
            _send_size(client)
        wanted, status = stdin, bytearray(_received(client))  # data may have come with the handshake's answer
        while not client.is_closed:
            # Read no more input until earlier input is sent. Output is read meanwhile, so that the two sides cannot deadlock.
            reading = [client.fileno(), resized, *([_INPUT] if wanted and not client.pending else [])]
            readable, writable, _ = select.select(reading, [client.fileno()] if client.pending else [], [])
            if writable:
                client.flush()
            if resized in readable:
                os.read(resized, _READ)
                if is_terminal:
                    _send_size(client)
            if _INPUT in readable:
                data = os.read(_INPUT, _READ)
                wanted = _send_input(client, data, detachable=detachable, endless=endless or detachable)
            if client.fileno() in readable:
                status += _received(client)
    if not status:
        raise Unavailable("the node closed the stream before its end; was virtshim stopped?")
    return _code(from_status(bytes(status)))


def _send_input(client: StreamClient, data: bytes, *, detachable: bool, endless: bool) -> bool:
    """Returns False at the end of input."""
    if not data:
        if not endless:
            client.close_channel(STDIN)
        return False
    before, detach, _ = data.partition(DETACH) if detachable else (data, b"", b"")
    if before:
        client.send(STDIN, before)
    if detach:
        raise Detached
    return True


def _received(client: StreamClient) -> bytes:
    """Writes output to its stream, and returns the bytes of the session's final status."""
    status = b""
    for piece in client.receive():
        if piece.channel == ERROR:
            status += piece.data
        elif piece.channel in _OUT:
            _write(_OUT[piece.channel], piece.data)
    return status


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another process has made this descriptor non-blocking
            select.select([], [fd], [])


def _send_size(client: StreamClient) -> None:
    if size := terminal.size(_INPUT):
        client.send(RESIZE, json.dumps({"Width": size[0], "Height": size[1]}).encode())


def _code(outcome: Outcome) -> int:
    match outcome:
        case Exited(code):
            return code
        case Failed(message):
            raise InternalError(message)


def exec_command(socket: str, wanted: str, command: Sequence[str], *, stdin: bool, tty: bool) -> int:
    """Runs a command in a guest and returns its exit code. Raises ShimError, BrokenPipeError."""
    streams = Streams(stdin=stdin, stdout=True, stderr=not tty, tty=tty)
    with connected(socket) as node:
        vm = node.with_trouble(running_vm(wanted, node.pods(), node.vms()))
        if vm.shown_state == "paused":
            raise WrongState(f"no command can run in {vm.name}: it is {vm.trouble}")
        url = node.exec_url(vm.id, command, streams)
    with contextlib.closing(streaming.connect(url)) as client:
        return relay(client, stdin=stdin, is_terminal=tty)


def console(socket: str, wanted: str) -> int:
    """Attaches this terminal to a VM's serial console. Returns 0 when the user detached or the VM shut down. Raises
    ShimError, BrokenPipeError."""
    with connected(socket) as node:
        vm = running_vm(wanted, node.pods(), node.vms())
        url, can_type = _attached(node, vm)
    with contextlib.closing(streaming.connect(url)) as client:
        _print_status(f"connected to {vm.name} ({vm.id[:12]}); " + ("Ctrl-] leaves" if can_type else "Ctrl-C leaves"))
        if not can_type:
            _print_status("the console takes no input; to type here, set stdin: true in the container's spec")
        try:
            return relay(client, stdin=can_type, is_terminal=True, detachable=True)
        except Detached:
            client.flush()
            _print_status("detached; the VM keeps running")
            return 0


def _attached(node: NodeClient, vm: VmSummary) -> tuple[str, bool]:
    """The stream's URL, and whether the VM takes input."""
    try:
        return node.console_url(vm.id, stdin=True), True
    except WrongState:  # created without stdin; or just ended, then the second call fails too
        return node.console_url(vm.id, stdin=False), False


def _print_status(text: str) -> None:
    print(f"\r\nconsole: {text}\r" if sys.stderr.isatty() else f"console: {text}", file=sys.stderr, flush=True)


# ssh.

_SSH: Final = "/usr/bin/ssh"
_SHORT: Final = 20
# The exit code of ssh if the session has failed; otherwise ssh exits with the command's code.
_SSH_FAILED: Final = 255


@dataclass(frozen=True, slots=True)
class SshOptions:
    """`inject`: a file of public keys to add to the guest first; "" for none. `identity`: the key file for ssh -i."""

    user: str
    identity: str = ""
    inject: str = ""
    command: Sequence[str] = ()


def ssh(socket: str, wanted: str, options: SshOptions) -> int:
    """Runs ssh and returns its exit code. Raises ShimError."""
    check_user(options.user)
    keys = _keys(options.inject) if options.inject else ()
    with connected(socket) as node:
        vm = running_vm(wanted, node.pods(), node.vms())
        addresses = node.addresses(vm.pod)
        if not addresses:
            raise WrongState(f"the pod of {vm.name} has no address")
        if keys:
            node.add_ssh_keys(vm.id, options.user, keys)
    argv = ssh_arguments(vm, addresses[0], options)
    before = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is ssh's; it has the default handler
    try:
        pid = os.posix_spawn(_SSH, argv, os.environ)  # no shell: each argument is one of ssh's
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except OSError as exc:
        raise WrongState(f"cannot run {_SSH}: {exc.strerror}; install the package openssh-client") from exc
    finally:
        signal.signal(signal.SIGINT, before)
    if code == _SSH_FAILED and not keys:
        hint = f"if the guest has refused your key, add it: virtshim ssh {wanted} --inject ~/.ssh/id_ed25519.pub"
        print(f"ssh: {hint}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def ssh_arguments(vm: VmSummary, address: str, options: SshOptions) -> list[str]:
    """The command line of ssh. The user's ssh configuration applies, except for the host key: another VM may get the same
    address later, so ssh remembers the key under the VM's id."""
    settings = {
        "HostKeyAlias": f"virtshim-{vm.id[:_SHORT]}",
        "CheckHostIP": "no",
        "StrictHostKeyChecking": "accept-new",
        "ConnectTimeout": "10",
    }
    identity = ["-i", options.identity] if options.identity else []
    named = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", *named, *identity, "-l", options.user, "--", address, *options.command]


def _keys(path: str) -> tuple[str, ...]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise InvalidRequest(f"--inject {path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"--inject {path}: not text; give the public key, such as ~/.ssh/id_ed25519.pub") from exc
    try:
        keys = parse_keys(text)
    except InvalidRequest as exc:
        raise InvalidRequest(f"--inject {path}: {exc}; give the public key, such as ~/.ssh/id_ed25519.pub") from exc
    if not keys:
        raise InvalidRequest(f"--inject {path}: the file holds no public key; give one such as ~/.ssh/id_ed25519.pub")
    return keys
