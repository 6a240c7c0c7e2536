"""`virtshim ssh`: becomes ssh to a VM, at the address that CNI gave its pod."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virtshim.cli.vm_lookup import running_vm
from virtshim.cri.client import VmSummary, connected
from virtshim.domain.errors import InvalidRequest, WrongState
from virtshim.domain.guest.login import check_user, parse_keys

_SSH: Final = "/usr/bin/ssh"
_SHORT: Final = 20


@dataclass(frozen=True, slots=True)
class SshOptions:
    """`inject`: a file of public keys that the guest is given first; "" for none. `identity`: ssh's own -i."""

    user: str
    identity: str = ""
    inject: str = ""
    command: Sequence[str] = ()


def ssh(socket: str, wanted: str, options: SshOptions) -> None:
    """Does not return. Raises ShimError."""
    check_user(options.user)
    keys = _keys(options.inject) if options.inject else ()
    with connected(socket) as node:
        vm = running_vm(wanted, node.pods(), node.vms())
        addresses = node.addresses(vm.pod)
        if not addresses:
            raise WrongState(f"the pod of {vm.name} has no address")
        if keys:
            node.add_ssh_keys(vm.id, options.user, keys)
    argv = arguments(vm, addresses[0], options)
    try:
        os.execv(_SSH, argv)  # noqa: S606  no shell: each argument is one of ssh's
    except OSError as exc:
        raise WrongState(f"{_SSH} cannot be run: {exc.strerror}; install the package openssh-client") from exc


def arguments(vm: VmSummary, address: str, options: SshOptions) -> list[str]:
    """Of ssh. Its user's own configuration holds, but for the host's key: addresses come back with other VMs, so it is
    remembered by the VM's id."""
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
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"--inject {path}: cannot be read: {exc}") from exc
    try:
        keys = parse_keys(text)
    except InvalidRequest as exc:
        raise InvalidRequest(f"--inject {path}: {exc}; give the public key, such as ~/.ssh/id_ed25519.pub") from exc
    if not keys:
        raise InvalidRequest(f"--inject {path}: there is no key in it")
    return keys
