"""Files in the guest, read through its agent."""

from __future__ import annotations

import base64
import binascii
from contextlib import suppress

from virtshim.domain.errors import InternalError, ShimError
from virtshim.guestagent.channel import AgentChannel, AgentRefused, mapping, whole_number
from virtshim.guestagent.wait import Patience

_MOST_HANDLE = 1 << 62


def open_file(channel: AgentChannel, path: str, mode: str, patience: Patience) -> int | None:
    """The agent's handle; None if the file cannot be opened. Errors: those of `AgentChannel.ask`."""
    try:
        handle = channel.ask("guest-file-open", {"path": path, "mode": mode}, patience)
    except AgentRefused:
        return None
    return whole_number(handle, "file handle", most=_MOST_HANDLE)


def close_file(channel: AgentChannel, handle: int, patience: Patience) -> None:
    with suppress(ShimError):  # an agent that was restarted has closed it
        channel.ask("guest-file-close", {"handle": handle}, patience)


def seek(channel: AgentChannel, handle: int, offset: int, whence: str, patience: Patience) -> int:
    """Where it stands then."""
    request = {"handle": handle, "offset": offset, "whence": whence}
    answer = mapping(channel.ask("guest-file-seek", request, patience), "file position")
    return whole_number(answer.get("position"), "file position", most=1 << 62)


def read_on(channel: AgentChannel, handle: int, most: int, patience: Patience) -> bytes:
    answer = mapping(channel.ask("guest-file-read", {"handle": handle, "count": most}, patience), "file")
    return _decoded(answer.get("buf-b64"), most)


def read_tail(channel: AgentChannel, path: str, most: int, patience: Patience) -> bytes:
    """The last bytes of a file, at most `most`; none if there is no such file."""
    handle = open_file(channel, path, "r", patience)
    if handle is None:
        return b""
    try:
        size = seek(channel, handle, 0, "end", patience)
        seek(channel, handle, max(0, size - most), "set", patience)
        return read_on(channel, handle, most, patience)
    finally:
        close_file(channel, handle, patience)


def _decoded(text: object, most: int) -> bytes:
    try:
        data = base64.b64decode(text if isinstance(text, str) else "", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InternalError("the guest agent returned no usable file content") from exc
    if len(data) > most:
        raise InternalError("the guest agent returned more of a file than it was asked for")
    return data
