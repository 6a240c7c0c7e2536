"""Collects facts about a node's other parts: clock, sockets, VMs' memory, RuntimeClasses. Does not judge them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import socket
import stat
from pathlib import Path
from typing import Final

import yaml

from virtshim.config.settings import Settings
from virtshim.model.errors import ShimError
from virtshim.model.sandbox import Sandbox
from virtshim.preflight.overhead import QemuMemory, RuntimeClass, name_of, runtime_class, taken
from virtshim.store.read_only import read_ready, read_running, read_unreadable
from virtshim.vm import qemu_process

_ERROR: Final = 5  # adjtimex(2): TIME_ERROR
_TIMEX: Final = 512  # bytes: more than struct timex has anywhere
_CONNECT_LIMIT: Final = 2.0
# How many names one line lists.
_FEW: Final = 5
_GIVEN: Final = re.compile(rb"(?:size=)?(\d+)([kKmMgG]?)")
_UNITS: Final = {b"k": 10, b"m": 20, b"g": 30, b"": 20}


def synchronised() -> tuple[bool | None, str]:
    """Whether the kernel's clock is synchronised; (None, reason) if the kernel cannot be asked."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX))
    return (None, os.strerror(ctypes.get_errno())) if state < 0 else (state != _ERROR, "")


def silence(path: str) -> str:
    """Why no process accepts a connection on the socket; "" if one does. Returns "" for a file that is not a socket."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return ""
    found = _refusal(path, socket.SOCK_STREAM)
    if found is not None and found.errno == errno.EPROTOTYPE:
        found = _refusal(path, socket.SOCK_SEQPACKET)
    return "" if found is None else found.strerror or str(found)


def _refusal(path: str, kind: int) -> OSError | None:
    try:
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as asking:
            asking.settimeout(_CONNECT_LIMIT)
            asking.connect(path)
    except OSError as exc:
        return exc
    return None


def qemus(settings: Settings) -> tuple[list[QemuMemory], str]:
    """The memory of each QEMU of this node, and why the records could not be read."""
    try:
        running = read_running(settings.layout().database)
    except ShimError as exc:
        return [], str(exc)
    directory = qemu_process.pid_directory(settings.libvirt.uri)
    found = []
    for sandbox, container in running:
        pid = qemu_process.find(directory, container.domain_name, container.domain_uuid)
        if pid is not None:
            declared = sandbox.overhead.memory_limit_bytes
            found.append(QemuMemory(sandbox.key.readable, declared, memory_beside_the_guest(f"/proc/{pid}")))
    return found, ""


def unread(settings: Settings) -> tuple[str, str]:
    """(which records cannot be read, remedy); "" if all can be read."""
    try:
        names = read_unreadable(settings.layout().database)
    except ShimError as exc:
        text, _, remedy = str(exc).partition("; ")
        return text, remedy
    if not names:
        return "", ""
    few = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
    return f"the records of {few} cannot be read", "delete their pods; crictl info shows the reason (config.unreadable)"


def ready(settings: Settings) -> list[Sandbox]:
    """The ready sandboxes in the records; none if the records cannot be read, which `unread` reports."""
    try:
        return read_ready(settings.layout().database)
    except ShimError:
        return []


def memory_beside_the_guest(process: str) -> int | None:
    """`process`: the QEMU's directory in /proc. Reading smaps walks the page tables of the whole guest: acceptable for a check
    by hand, not for metrics."""
    try:
        words = Path(process, "cmdline").read_bytes().split(b"\0")
        given = _GIVEN.match(words[words.index(b"-m") + 1])
        smaps = Path(process, "smaps").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError, IndexError):
        return None
    return taken(smaps, int(given[1]) << _UNITS[given[2].lower()]) if given else None


def runtime_classes_of(path: str) -> list[RuntimeClass]:
    """The RuntimeClasses in the file; empty if the file does not exist."""
    try:
        documents = list(yaml.safe_load_all(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as exc:
        return [RuntimeClass(path, trouble=" ".join(str(exc).split())[:200])]
    return [runtime_class(f"{path}, {name_of(one)}", one) for one in documents]
