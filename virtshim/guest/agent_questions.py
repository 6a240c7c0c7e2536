"""Requests to a guest's agent other than commands: freezing file systems, clock, SSH keys, files, console size.
Implements `virtshim.guest.ports.GuestOperations`.

The protocol: docs.qemu.org, "QEMU Guest Agent Protocol Reference".
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from virtshim.guest import exec_scripts
from virtshim.guest.agent_channel import AgentChannel, AgentRefused, CommandDisabled, mapping, whole_number
from virtshim.guest.guest_exec import GuestVm
from virtshim.guest.ports import GuestFilesystem
from virtshim.guest.wait import CancellableDeadline
from virtshim.model.errors import DeadlineExceeded, InternalError, NotFound, ShimError, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.text import printable_text

# What a guest reports about itself, bounded in size. Parsing is pure: it turns any JSON into a bounded document.

ASK_FILESYSTEMS = "guest-get-fsinfo"

_MAX_TEXT = 120
_MAX_ITEMS = 16
_GUEST_INFO_MAX_NUMBER = 1 << 63


class Asked(Protocol):
    """The part of an `AgentChannel` that is used here."""

    def ask(self, command: str, arguments: Mapping[str, Any] | None, deadline: CancellableDeadline) -> Any: ...


def ask_guest_info(channel: Asked, deadline: CancellableDeadline) -> Mapping[str, object]:
    """One entry for each question that the agent answers in time."""
    facts: dict[str, object] = {}
    with suppress(ShimError):
        for key, (command, read) in _QUESTIONS.items():
            with suppress(AgentRefused, CommandDisabled):
                facts[key] = read(channel.ask(command, None, deadline))
    return facts


def _text(value: object) -> str:
    words = value if isinstance(value, str) else ""
    return printable_text(words[:_MAX_TEXT])


def _number(value: object) -> int:
    right = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _GUEST_INFO_MAX_NUMBER
    return value if isinstance(value, int) and right else 0


def _mappings(value: object) -> list[Mapping[str, Any]]:
    items = value if isinstance(value, list) else []
    return [item for item in items[:_MAX_ITEMS] if isinstance(item, dict)]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _system(answer: object) -> dict[str, str]:
    names = ("pretty-name", "id", "version-id", "kernel-release", "machine")
    return {name: _text(_mapping(answer).get(name)) for name in names if _mapping(answer).get(name)}


def _hostname(answer: object) -> str:
    return _text(_mapping(answer).get("host-name"))


def _interfaces(answer: object) -> list[dict[str, object]]:
    return [
        {
            "name": _text(item.get("name")),
            "mac": _text(item.get("hardware-address")),
            "addresses": [
                f"{_text(address.get('ip-address'))}/{_number(address.get('prefix'))}"
                for address in _mappings(item.get("ip-addresses"))
            ],
        }
        for item in _mappings(answer)
    ]


def _users(answer: object) -> list[str]:
    return [_text(item.get("user")) for item in _mappings(answer)]


def filesystems_in(answer: object) -> tuple[GuestFilesystem, ...]:
    return tuple(
        GuestFilesystem(
            mount_point=_text(item.get("mountpoint")),
            kind=_text(item.get("type")),
            device=_text(item.get("name")),
            used_bytes=_number(item.get("used-bytes")),
            total_bytes=_number(item.get("total-bytes")),
        )
        for item in _mappings(answer)
    )


def _filesystems(answer: object) -> list[dict[str, object]]:
    return [
        {
            "mountpoint": one.mount_point,
            "type": one.kind,
            "device": one.device,
            "usedBytes": one.used_bytes,
            "totalBytes": one.total_bytes,
        }
        for one in filesystems_in(answer)
    ]


def _version(answer: object) -> str:
    return _text(_mapping(answer).get("version"))


_QUESTIONS: Mapping[str, tuple[str, Callable[[object], object]]] = {
    "agentVersion": ("guest-info", _version),
    "system": ("guest-get-osinfo", _system),
    "hostname": ("guest-get-host-name", _hostname),
    "interfaces": ("guest-network-get-interfaces", _interfaces),
    "users": ("guest-get-users", _users),
    "filesystems": (ASK_FILESYSTEMS, _filesystems),
}


# Files in the guest, read through its agent.

# The largest file handle and position that an agent may return.
_AGENT_FILES_MAX_NUMBER = 1 << 62


def open_guest_file(channel: AgentChannel, path: str, mode: str, deadline: CancellableDeadline) -> int | None:
    """The agent's handle; None if the file cannot be opened. Errors: those of `AgentChannel.ask`."""
    try:
        handle = channel.ask("guest-file-open", {"path": path, "mode": mode}, deadline)
    except AgentRefused:
        return None
    return whole_number(handle, "file handle", most=_AGENT_FILES_MAX_NUMBER)


def close_guest_file(channel: AgentChannel, handle: int, deadline: CancellableDeadline) -> None:
    with suppress(ShimError):  # an agent that was restarted has closed the file
        channel.ask("guest-file-close", {"handle": handle}, deadline)


def seek_guest_file(channel: AgentChannel, handle: int, offset: int, whence: str, deadline: CancellableDeadline) -> int:
    """Returns the new position."""
    request = {"handle": handle, "offset": offset, "whence": whence}
    answer = mapping(channel.ask("guest-file-seek", request, deadline), "file position")
    return whole_number(answer.get("position"), "file position", most=_AGENT_FILES_MAX_NUMBER)


def read_guest_file(channel: AgentChannel, handle: int, most: int, deadline: CancellableDeadline) -> bytes:
    answer = mapping(channel.ask("guest-file-read", {"handle": handle, "count": most}, deadline), "file")
    return _decoded(answer.get("buf-b64"), most)


def read_tail(channel: AgentChannel, path: str, most: int, deadline: CancellableDeadline) -> bytes:
    """The last `most` bytes of a file, or fewer; none if the file does not exist."""
    handle = open_guest_file(channel, path, "r", deadline)
    if handle is None:
        return b""
    try:
        size = seek_guest_file(channel, handle, 0, "end", deadline)
        seek_guest_file(channel, handle, max(0, size - most), "set", deadline)
        return read_guest_file(channel, handle, most, deadline)
    finally:
        close_guest_file(channel, handle, deadline)


def _decoded(text: object, most: int) -> bytes:
    try:
        data = base64.b64decode(text if isinstance(text, str) else "", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InternalError("the guest agent returned no usable file content") from exc
    if len(data) > most:
        raise InternalError("the guest agent returned more of a file than it was asked for")
    return data


# A present agent answers a ping at once. A checkpoint does not wait for an absent one.
_PING: Final = 2.0
# A smaller deviation in seconds is left alone, so that a clock that NTP disciplines is not disturbed.
_OFF: Final = 0.5
# An agent that cannot restart its guest says so within these seconds.
_GOES_DOWN: Final = 3.0
_MAX_NS: Final = 1 << 63
_CONSOLE: Final = "/dev/ttyS0"


class AgentOperations:
    def __init__(self, vm: Callable[[ContainerId], GuestVm]) -> None:
        self._vm = vm

    def freeze(self, container: ContainerId, timeout: float) -> int:
        channel = self._vm(container).channel
        deadline = CancellableDeadline.after(timeout)
        try:
            channel.ask("guest-ping", None, deadline.at_most(_PING))
        except DeadlineExceeded as exc:
            raise WrongState(f"no guest agent answers: {exc}") from exc
        return whole_number(channel.ask("guest-fsfreeze-freeze", None, deadline), "number of frozen file systems")

    def thaw(self, container: ContainerId, timeout: float) -> None:
        self._vm(container).channel.ask("guest-fsfreeze-thaw", None, CancellableDeadline.after(timeout))

    def reboot(self, container: ContainerId, timeout: float) -> None:
        """Success shows as silence or a broken connection, and any answer means failure: the agent runs
        `/sbin/shutdown`, which some guests do not have."""
        deadline = CancellableDeadline.after(timeout)
        channel = self._vm(container).channel
        try:
            channel.ask("guest-ping", None, deadline.at_most(_PING))
        except DeadlineExceeded as exc:
            raise WrongState(f"no guest agent answers: {exc}; `virtshim reset` needs none") from exc
        try:
            channel.ask("guest-shutdown", {"mode": "reboot"}, deadline.at_most(_GOES_DOWN))
        except (DeadlineExceeded, Unavailable):
            return
        except (AgentRefused, CommandDisabled):
            code = self._rebooted_by_script(container, deadline)
            if code:
                raise InternalError(
                    f"the guest cannot restart itself (exit code {code}); use `virtshim reset`"
                ) from None

    def _rebooted_by_script(self, container: ContainerId, deadline: CancellableDeadline) -> int:
        try:
            return self._vm(container).run_script(exec_scripts.REBOOT, (), deadline)
        except Unavailable:  # the guest is shutting down
            return 0

    def set_clock(self, container: ContainerId, timeout: float) -> None:
        """If the agent may not take the time from virtshim, it may still read it from the hardware clock."""
        channel = self._vm(container).channel
        deadline = CancellableDeadline.after(timeout)
        shown = whole_number(channel.ask("guest-get-time", None, deadline), "time", most=_MAX_NS)
        if abs(shown - time.time_ns()) < _OFF * 1e9:
            return
        try:
            channel.ask("guest-set-time", {"time": time.time_ns()}, deadline)
        except AgentRefused:
            channel.ask("guest-set-time", None, deadline)

    def run_script(
        self,
        container: ContainerId,
        script: str,
        arguments: Sequence[str],
        data: bytes,
        timeout: float,
        cancelled: threading.Event,
    ) -> tuple[int, str]:
        deadline = CancellableDeadline.after(timeout, cancelled)
        return self._vm(container).run_script_with(script, arguments, data, deadline)

    def add_ssh_keys(self, container: ContainerId, user: str, keys: Sequence[str], timeout: float) -> None:
        request = {"username": user, "keys": list(keys), "reset": False}
        channel = self._vm(container).channel
        try:
            channel.ask("guest-ssh-add-authorized-keys", request, CancellableDeadline.after(timeout))
        except AgentRefused as exc:
            raise NotFound(f"{exc}; is there a user {user!r} with a home directory in the guest?") from exc
        except CommandDisabled as exc:
            raise WrongState(f"{exc} (it needs QEMU guest agent 5.2 or later)") from exc

    def read_tail(self, container: ContainerId, path: str, most: int, timeout: float) -> bytes:
        return read_tail(self._vm(container).channel, path, most, CancellableDeadline.after(timeout))

    def filesystems(self, container: ContainerId, timeout: float) -> Sequence[GuestFilesystem]:
        return filesystems_in(
            self._vm(container).channel.ask(ASK_FILESYSTEMS, None, CancellableDeadline.after(timeout))
        )

    def resize_console(self, container: ContainerId, columns: int, rows: int, timeout: float) -> None:
        words = (_CONSOLE, str(rows), str(columns))
        code = self._vm(container).run_script(exec_scripts.RESIZE_CONSOLE, words, CancellableDeadline.after(timeout))
        if code:
            raise InternalError(f"the guest cannot set the size of {_CONSOLE} (exit code {code})")
