"""Reads single fields of a protobuf message's bytes, and leaves the rest alone: what the proxy does not know passes through.

As a parser would: of a field that is there several times the last counts, and messages are merged.
"""

from __future__ import annotations

from collections.abc import Iterator

from virtshim.domain.errors import InvalidRequest

_VARINT, _EIGHT_BYTES, _PAYLOAD, _FOUR_BYTES = 0, 1, 2, 5


def payloads(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each string, bytes or message field, in order. Raises InvalidRequest for what is no message."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == _PAYLOAD:
            size, place = _varint(data, place)
            end = place + size
            if end > len(data):
                raise _broken()
            yield key >> 3, data[place:end]
            place = end
        elif kind == _VARINT:
            _, place = _varint(data, place)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            place += 8 if kind == _EIGHT_BYTES else 4
        else:
            raise _broken()
    if place > len(data):
        raise _broken()


def message(data: bytes, number: int) -> bytes:
    """The message in field `number`; merging two messages is writing one behind the other."""
    return b"".join(content for found, content in payloads(data) if found == number)


def text(data: bytes, number: int) -> str:
    """The string in field `number`, "" if it is not there."""
    content = b""
    for found, candidate in payloads(data):
        if found == number:
            content = candidate
    return _decoded(content)


def text_map(data: bytes, number: int) -> dict[str, str]:
    """The map<string, string> in field `number`."""
    return {text(entry, 1): text(entry, 2) for found, entry in payloads(data) if found == number}


def texts(data: bytes) -> list[str]:
    """All strings that stand in the message itself, in order; none of what is no message."""
    found: list[str] = []
    try:
        for _, content in payloads(data):
            if content.isascii():
                found.append(content.decode())
    except InvalidRequest:
        return []
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(data) and shift < 64:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise _broken()


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise InvalidRequest("a text of the request is not UTF-8; send it as Kubernetes does") from exc


def _broken() -> InvalidRequest:
    return InvalidRequest("the request is no protobuf message of the CRI; send it as Kubernetes does")
