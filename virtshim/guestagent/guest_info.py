"""What a guest reports about itself, bounded in size. Parsing is pure: any JSON in, a bounded document out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from virtshim.domain.errors import ShimError
from virtshim.domain.guest.filesystems import GuestFilesystem
from virtshim.domain.printable import printable_text
from virtshim.guestagent.channel import AgentRefused, CommandDisabled
from virtshim.guestagent.wait import CancellableDeadline

ASK_FILESYSTEMS = "guest-get-fsinfo"

_MAX_TEXT = 120
_MAX_ITEMS = 16
_MAX_NUMBER = 1 << 63


class Asked(Protocol):
    """What is wanted of an `AgentChannel`."""

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
    right = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER
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
