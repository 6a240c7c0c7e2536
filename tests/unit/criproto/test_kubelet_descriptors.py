"""The compiled contracts of kubelet's device plugin and pod-resources interfaces equal their published descriptors."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from criproto.deviceplugin_v1beta1 import deviceplugin_pb2
from criproto.podresources_v1 import podresources_pb2

FieldProto = descriptor_pb2.FieldDescriptorProto


def interface(name: str, module: Any) -> tuple[dict[str, Any], descriptor_pb2.FileDescriptorProto]:
    compiled = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(compiled)
    return json.loads(Path(__file__).with_name(f"{name}_descriptor.json").read_text()), compiled


INTERFACES = [
    interface("deviceplugin_v1beta1", deviceplugin_pb2),
    interface("podresources_v1", podresources_pb2),
]
both = pytest.mark.parametrize(
    ("published", "compiled"), INTERFACES, ids=[published["package"] for published, _ in INTERFACES]
)


def described(message: descriptor_pb2.DescriptorProto, field: FieldProto) -> tuple[int, str, str]:
    """Number, label and type, in the words of the published table."""
    for entry in message.nested_type:
        if entry.options.map_entry and field.type_name.endswith(f".{entry.name}"):
            types = [FieldProto.Type.Name(part.type).removeprefix("TYPE_").lower() for part in entry.field]
            return field.number, "map", " -> ".join(types)
    scalar = FieldProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    label = "repeated" if field.label == field.LABEL_REPEATED else "singular"
    return field.number, label, field.type_name.removeprefix(".") or scalar


def published_fields(message: dict[str, Any]) -> dict[str, tuple[int, str, str]]:
    found = {}
    for field in message["fields"]:
        kind = f"{field['map_key_type']} -> {field['map_value_type']}" if field["label"] == "map" else field["type"]
        found[field["name"]] = (field["number"], field["label"], kind)
    return found


@both
def test_every_message_has_its_published_fields_and_no_other(published, compiled) -> None:
    assert (compiled.package, compiled.syntax) == (published["package"], published["syntax"])
    assert len(published["messages"]) == published["counts"]["messages"]
    assert {
        f"{compiled.package}.{message.name}": {field.name: described(message, field) for field in message.field}
        for message in compiled.message_type
    } == {name: published_fields(message) for name, message in published["messages"].items()}


@both
def test_every_rpc_has_its_published_path_types_and_streaming_directions(published, compiled) -> None:
    assert {
        f"/{compiled.package}.{service.name}/{rpc.name}": (
            rpc.input_type.removeprefix("."),
            rpc.output_type.removeprefix("."),
            rpc.client_streaming,
            rpc.server_streaming,
        )
        for service in compiled.service
        for rpc in service.method
    } == {
        rpc["path"]: (rpc["request"], rpc["response"], rpc["client_streaming"], rpc["server_streaming"])
        for service in published["services"].values()
        for rpc in service["rpcs"]
    }
