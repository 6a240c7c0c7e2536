"""What the CRI's own description says of its methods: which field holds an id, which answers are lists, what is streamed.

So a method that a later CRI adds in the shape of those that are there is routed as they are, once criproto knows it; before that
it is passed on too, see `virtshim.proxy.dispatch.Dispatch.unknown`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from criproto.runtime_v1 import api_pb2 as pb


class Id(enum.Enum):
    """Whose id it is."""

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
    """As in HTTP/2: /package.Service/Name."""
    shape: Shape
    id: Id | None = None
    id_field: int = 0
    config_field: int = 0
    handler_field: int = 0

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def field(message: type[Message], name: str) -> int:
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
LIST_METRICS_KNOWN: Final = f"{_RUNTIME}/ListMetricDescriptors"
RUN_POD: Final = f"{_RUNTIME}/RunPodSandbox"
CREATE_CONTAINER: Final = f"{_RUNTIME}/CreateContainer"
CONTAINER_STATUS: Final = f"{_RUNTIME}/ContainerStatus"
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
