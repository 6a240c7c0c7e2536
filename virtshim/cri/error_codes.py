"""Maps kinds of errors to gRPC codes and back, and limits the length of error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc

from virtshim.model.errors import Kind
from virtshim.model.text import escaped

# Bytes of an encoded error message.
_MESSAGE_ROOM = 6000

GRPC_CODES: Mapping[Kind, grpc.StatusCode] = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Kind.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    Kind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    # kubelet looks for known words at the beginning of a message only if its code is UNKNOWN.
    Kind.REGISTRY: grpc.StatusCode.UNKNOWN,
    Kind.SIGNATURE: grpc.StatusCode.UNKNOWN,
    Kind.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.PERMISSION: grpc.StatusCode.PERMISSION_DENIED,
    Kind.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    Kind.ABORTED: grpc.StatusCode.ABORTED,
    Kind.INTERNAL: grpc.StatusCode.INTERNAL,
}

_KINDS: Final = {code: kind for kind, code in GRPC_CODES.items() if code is not grpc.StatusCode.UNKNOWN}
_BEGINNINGS: Final = {"RegistryUnavailable:": Kind.REGISTRY, "SignatureValidationFailed:": Kind.SIGNATURE}


def kind_of(code: grpc.StatusCode, message: str) -> Kind:
    """The kind that the node meant; INTERNAL for codes that virtshim never sends."""
    if code is grpc.StatusCode.UNKNOWN:
        return next((kind for words, kind in _BEGINNINGS.items() if message.startswith(words)), Kind.INTERNAL)
    return _KINDS.get(code, Kind.INTERNAL)


def on_the_wire(message: str) -> str:
    """Shortens a message so that it arrives: gRPC drops trailers above 8 KiB, and encodes every byte outside printable
    ASCII as three. A message may quote the request, so it may have any length."""
    message = escaped(message.encode(errors="replace").decode(), _MESSAGE_ROOM)
    room = _MESSAGE_ROOM
    for place, char in enumerate(message):
        room -= 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())
        if room < 0:
            return message[:place] + " ..."
    return message
