"""The compiled contracts equal the published descriptors, and the generated code is what the .proto texts make.

NAME_descriptor.json lists the messages, fields, enums and RPCs of a published API. Each comparison is an equality of
whole tables, so anything missing, extra or different on either side fails and is named in the diff.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from criproto import generate
from criproto.deviceplugin_v1beta1 import deviceplugin_pb2
from criproto.podresources_v1 import podresources_pb2
from criproto.runtime_v1 import api_pb2, api_pb2_grpc

# For each API: its compiled module, and the numbers of its messages and RPCs.
APIS: dict[str, tuple[ModuleType, int, int]] = {
    "cri_v1": (api_pb2, 175, 43),
    "deviceplugin_v1beta1": (deviceplugin_pb2, 20, 6),
    "podresources_v1": (podresources_pb2, 15, 3),
}


class Api:
    """A published API, and what was compiled of it."""

    def __init__(self, name: str) -> None:
        self.published: dict[str, Any] = json.loads(Path(__file__).with_name(f"{name}_descriptor.json").read_text())
        module, self.messages_there, self.rpcs_there = APIS[name]
        self._descriptor: Any = module.DESCRIPTOR
        self.compiled = descriptor_pb2.FileDescriptorProto()
        self._descriptor.CopyToProto(self.compiled)
        self.messages = dict(self._messages(self.compiled.package, self.compiled.message_type))
        self._map_entries = dict(self._messages(self.compiled.package, self.compiled.message_type, map_entries=True))

    def _messages(
        self, prefix: str, messages: Any, *, map_entries: bool = False
    ) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
        """Messages with their full names, nested ones too. The hidden entry types of maps come only when asked for."""
        for message in messages:
            if message.options.map_entry == map_entries:
                yield f"{prefix}.{message.name}", message
            yield from self._messages(f"{prefix}.{message.name}", message.nested_type, map_entries=map_entries)

    def described(self, message: str, field: descriptor_pb2.FieldDescriptorProto) -> dict[str, Any]:
        """A compiled field in the shape of the published table. Generated code leaves JSON names to the descriptor pool."""
        json_name = self._descriptor.pool.FindFieldByName(f"{message}.{field.name}").json_name
        kind, type_name = type_of(field)
        label = "repeated" if field.label == field.LABEL_REPEATED else "singular"
        row = {"name": field.name, "number": field.number, "json_name": json_name}
        if type_name in self._map_entries:
            key, value = self._map_entries[type_name].field
            row |= {"kind": "map", "label": "map", "type": "map"}
            row |= {"map_key_type": type_of(key)[1], "map_value_type": type_of(value)[1]}
        else:
            row |= {"kind": kind, "label": label, "type": type_name}
        row |= {option: True for option in ("deprecated", "debug_redact") if getattr(field.options, option)}
        return row

    def published_fields(self) -> dict[str, dict[str, Any]]:
        """Without `optional`, which is the same on the wire: nobody here asks whether such a field is there."""
        return {
            f"{message}.{field['name']}": {
                key: value for key, value in field.items() if key not in ("since", "proto3_optional")
            }
            for message, facts in self.published["messages"].items()
            for field in facts["fields"]
        }

    def enums(self) -> Iterator[tuple[str, descriptor_pb2.EnumDescriptorProto]]:
        yield from ((f"{self.compiled.package}.{enum.name}", enum) for enum in self.compiled.enum_type)
        for name, message in self.messages.items():
            yield from ((f"{name}.{enum.name}", enum) for enum in message.enum_type)


def type_of(field: descriptor_pb2.FieldDescriptorProto) -> tuple[str, str]:
    """The kind and the type of a field, in the words of the published table."""
    kinds = {field.TYPE_MESSAGE: "message", field.TYPE_ENUM: "enum"}
    if field.type in kinds:
        return kinds[field.type], field.type_name.removeprefix(".")
    return "scalar", descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> Api:
    return Api(request.param)


def test_the_file_is_proto3_in_the_published_package(api: Api) -> None:
    assert (api.compiled.package, api.compiled.syntax) == (api.published["package"], api.published["syntax"])


def test_the_published_table_is_whole(api: Api) -> None:
    counts = api.published["counts"]
    assert len(api.published["messages"]) == counts["messages"] == api.messages_there
    assert len(api.published_fields()) == counts["fields"]
    assert sum(len(enum["values"]) for enum in api.published["enums"].values()) == counts["enum_values"]
    assert sum(len(service["rpcs"]) for service in api.published["services"].values()) == api.rpcs_there


def test_every_published_message_is_compiled_and_no_other(api: Api) -> None:
    assert api.messages.keys() == api.published["messages"].keys()


def test_every_field_has_its_published_number_type_label_and_options(api: Api) -> None:
    compiled = {
        f"{name}.{field.name}": api.described(name, field)
        for name, message in api.messages.items()
        for field in message.field
    }
    assert compiled == api.published_fields()


def test_there_are_no_oneofs_reserved_numbers_or_extensions_as_in_the_published_table(api: Api) -> None:
    for name, message in api.messages.items():
        assert not message.oneof_decl, name
        assert not message.reserved_range, name
        assert not message.reserved_name, name
        assert not message.extension_range, name
    assert not api.compiled.extension


def test_every_enum_has_its_published_values_and_no_other(api: Api) -> None:
    compiled = {name: [(value.name, value.number) for value in enum.value] for name, enum in api.enums()}
    published = {
        name: [(value["name"], value["number"]) for value in enum["values"]]
        for name, enum in api.published["enums"].items()
    }
    assert compiled == published


def test_every_rpc_has_its_published_path_types_and_streaming_directions(api: Api) -> None:
    compiled = {
        f"/{api.compiled.package}.{service.name}/{rpc.name}": (
            rpc.input_type.removeprefix("."),
            rpc.output_type.removeprefix("."),
            rpc.client_streaming,
            rpc.server_streaming,
        )
        for service in api.compiled.service
        for rpc in service.method
    }
    published = {
        rpc["path"]: (rpc["request"], rpc["response"], rpc["client_streaming"], rpc["server_streaming"])
        for service in api.published["services"].values()
        for rpc in service["rpcs"]
    }
    assert compiled == published


@pytest.mark.parametrize("service", ["RuntimeService", "ImageService"])
def test_stub_and_servicer_have_every_rpc(service: str) -> None:
    names = {rpc["name"] for rpc in Api("cri_v1").published["services"][f"runtime.v1.{service}"]["rpcs"]}
    servicer = getattr(api_pb2_grpc, f"{service}Servicer")
    assert names == {name for name in vars(servicer) if not name.startswith("_")}


@pytest.mark.parametrize("contract", generate.CONTRACTS, ids=lambda contract: contract.package)
def test_generating_twice_gives_the_same_bytes(contract: generate.Contract) -> None:
    assert generate.generated_files(contract) == generate.generated_files(contract)


def test_the_generated_files_are_up_to_date() -> None:
    assert generate.stale_files() == [], "run: python -m criproto.generate"


def test_a_changed_generated_file_is_reported(tmp_path: Path) -> None:
    contract = generate.CONTRACTS[0]
    here = tmp_path, (contract,)
    (tmp_path / contract.proto).write_bytes((generate.HERE / contract.proto).read_bytes())
    generate.write_files(*here)
    assert generate.stale_files(*here) == []
    (tmp_path / contract.package / "api_pb2.py").write_text("changed\n")
    (tmp_path / contract.package / "left_over_pb2.py").write_text("")
    assert generate.stale_files(*here) == [f"{contract.package}/api_pb2.py", f"{contract.package}/left_over_pb2.py"]


def test_generated_modules_import_each_other_by_their_package() -> None:
    module = importlib.import_module("criproto.runtime_v1.api_pb2_grpc")
    text = Path(module.__file__ or "").read_text()
    assert "from criproto.runtime_v1 import api_pb2" in text
