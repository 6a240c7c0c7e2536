"""Files in the guest, read through its agent."""

from __future__ import annotations

import base64
import binascii
from contextlib import suppress

from virtshim.domain.errors import InternalError, ShimError
from virtshim.guestagent.channel import AgentChannel, AgentRefused, mapping, whole_number
from virtshim.guestagent.wait import CancellableDeadline

# Of file handles and positions that an agent may give.
_MAX_NUMBER = 1 << 62


def open_file(channel: AgentChannel, path: str, mode: str, deadline: CancellableDeadline) -> int | None:
    """The agent's handle; None if the file cannot be opened. Errors: those of `AgentChannel.ask`."""
    try:
        handle = channel.ask("guest-file-open", {"path": path, "mode": mode}, deadline)
    except AgentRefused:
        return None
    return whole_number(handle, "file handle", most=_MAX_NUMBER)


def close_file(channel: AgentChannel, handle: int, deadline: CancellableDeadline) -> None:
    with suppress(ShimError):  # an agent that was restarted has closed it
        channel.ask("guest-file-close", {"handle": handle}, deadline)


def seek(channel: AgentChannel, handle: int, offset: int, whence: str, deadline: CancellableDeadline) -> int:
    """Where it stands then."""
    request = {"handle": handle, "offset": offset, "whence": whence}
    answer = mapping(channel.ask("guest-file-seek", request, deadline), "file position")
    return whole_number(answer.get("position"), "file position", most=_MAX_NUMBER)


def read_on(channel: AgentChannel, handle: int, most: int, deadline: CancellableDeadline) -> bytes:
    answer = mapping(channel.ask("guest-file-read", {"handle": handle, "count": most}, deadline), "file")
    return _decoded(answer.get("buf-b64"), most)


def read_tail(channel: AgentChannel, path: str, most: int, deadline: CancellableDeadline) -> bytes:
    """The last bytes of a file, at most `most`; none if there is no such file."""
    handle = open_file(channel, path, "r", deadline)
    if handle is None:
        return b""
    try:
        size = seek(channel, handle, 0, "end", deadline)
        seek(channel, handle, max(0, size - most), "set", deadline)
        return read_on(channel, handle, most, deadline)
    finally:
        close_file(channel, handle, deadline)


def _decoded(text: object, most: int) -> bytes:
    try:
        data = base64.b64decode(text if isinstance(text, str) else "", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InternalError("the guest agent returned no usable file content") from exc
    if len(data) > most:
        raise InternalError("the guest agent returned more of a file than it was asked for")
    return data
