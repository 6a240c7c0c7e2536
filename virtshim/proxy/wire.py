"""Reads single fields from a protobuf message's bytes, so that unknown fields pass through. Also describes the CRI's methods.

If a field is repeated, the last value counts and messages are merged, as in any protobuf parser.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InvalidRequest

_VARINT, _EIGHT_BYTES, _PAYLOAD, _FOUR_BYTES = 0, 1, 2, 5


def payloads(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each string, bytes or message field, in order. Raises InvalidRequest if `data` is not a message."""
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
    """The message in field `number`. Joining the bytes of two messages merges them."""
    return b"".join(content for found, content in payloads(data) if found == number)


def message_at(data: bytes, *numbers: int) -> bytes:
    """The message at the end of these nested fields."""
    for number in numbers:
        data = message(data, number)
    return data


def text_field(number: int, value: str) -> bytes:
    """The field of a string, to be joined to a message. `number`: at most 15."""
    content = value.encode()
    size, out = len(content), [number << 3 | _PAYLOAD]
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size]) + content


def text(data: bytes, number: int) -> str:
    """The string in field `number`; "" if there is none."""
    content = b""
    for found, candidate in payloads(data):
        if found == number:
            content = candidate
    return _decoded(content)


def text_map(data: bytes, number: int) -> dict[str, str]:
    """The map<string, string> in field `number`."""
    return {text(entry, 1): text(entry, 2) for found, entry in payloads(data) if found == number}


def texts(data: bytes) -> list[str]:
    """All strings in the message itself, in order; none if `data` is not a message."""
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
    return InvalidRequest("the request is not a protobuf message of the CRI; send it as Kubernetes does")


# The CRI's methods, from its own descriptors: which field holds an id, which answers are lists, which are streamed.
#
# If a later CRI adds a method of a known shape, it is routed by that shape as soon as criproto has it. Until then see
# `virtshim.proxy.dispatch.Dispatch.unknown`.


class Id(enum.Enum):
    """What an id is for."""

    POD = "pod_sandbox_id"
    CONTAINER = "container_id"


class Shape(enum.Enum):
    WITH_ID = "goes to the owner of an id"
    NEW_POD = "makes a pod of a configuration"
    LISTS = "the answer is nothing but lists"
    LIST_STREAM = "lists, in pieces"
    EVENTS = "a stream without an end"
    OTHER = "has a rule of its own, or is the primary's"


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    """The path in HTTP/2: /package.Service/Name."""
    shape: Shape
    id: Id | None = None
    id_field: int = 0
    config_field: int = 0
    handler_field: int = 0

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def field_number(message: type[Message], name: str) -> int:
    return message.DESCRIPTOR.fields_by_name[name].number


def _method(described: MethodDescriptor) -> Method:
    path = f"/{described.containing_service.full_name}/{described.name}"
    asked, answered = described.input_type, described.output_type
    is_list = bool(answered.fields) and all(one.is_repeated for one in answered.fields)
    if described.server_streaming:
        return Method(path, Shape.LIST_STREAM if is_list else Shape.EVENTS)
    if is_list:
        return Method(path, Shape.LISTS)
    for kind in Id:
        if found := asked.fields_by_name.get(kind.value):
            return Method(path, Shape.WITH_ID, kind, found.number)
    if {"config", "runtime_handler"} <= set(asked.fields_by_name):
        config, handler = (asked.fields_by_name[name].number for name in ("config", "runtime_handler"))
        return Method(path, Shape.NEW_POD, config_field=config, handler_field=handler)
    return Method(path, Shape.OTHER)


METHODS: Final = {
    method.path: method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in map(_method, service.methods)
}

_RUNTIME: Final = "/runtime.v1.RuntimeService"
_IMAGES: Final = "/runtime.v1.ImageService"
LIST_PODS: Final = f"{_RUNTIME}/ListPodSandbox"
LIST_CONTAINERS: Final = f"{_RUNTIME}/ListContainers"
LIST_CONTAINER_STATS: Final = f"{_RUNTIME}/ListContainerStats"
LIST_POD_STATS: Final = f"{_RUNTIME}/ListPodSandboxStats"
LIST_METRICS_KNOWN: Final = f"{_RUNTIME}/ListMetricDescriptors"
CREATE_CONTAINER: Final = f"{_RUNTIME}/CreateContainer"
CONTAINER_STATUS: Final = f"{_RUNTIME}/ContainerStatus"
POD_STATUS: Final = f"{_RUNTIME}/PodSandboxStatus"
POD_STATS: Final = f"{_RUNTIME}/PodSandboxStats"
STOP_POD: Final = f"{_RUNTIME}/StopPodSandbox"
REMOVE_POD: Final = f"{_RUNTIME}/RemovePodSandbox"
UPDATE_POD: Final = f"{_RUNTIME}/UpdatePodSandboxResources"
CHECKPOINT_POD: Final = f"{_RUNTIME}/CheckpointPod"
RESTORE_POD: Final = f"{_RUNTIME}/RestorePod"
VERSION: Final = f"{_RUNTIME}/Version"
START_CONTAINER: Final = f"{_RUNTIME}/StartContainer"
STATUS: Final = f"{_RUNTIME}/Status"
RUNTIME_CONFIG: Final = f"{_RUNTIME}/RuntimeConfig"
UPDATE_RUNTIME_CONFIG: Final = f"{_RUNTIME}/UpdateRuntimeConfig"
IMAGE_STATUS: Final = f"{_IMAGES}/ImageStatus"
PULL_IMAGE: Final = f"{_IMAGES}/PullImage"
REMOVE_IMAGE: Final = f"{_IMAGES}/RemoveImage"
LIST_IMAGES: Final = f"{_IMAGES}/ListImages"
IMAGE_FS_INFO: Final = f"{_IMAGES}/ImageFsInfo"
