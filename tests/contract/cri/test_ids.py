"""Ids have 64 hex digits, and a unique prefix works in every call that takes an id."""

from __future__ import annotations

import re
import secrets
from typing import Any

import grpc
import pytest
from fakes.cri import RPCS, SERVED, Client
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.cri

Code = grpc.StatusCode
TAKES_ID = [
    pytest.param(rpc, field, id=rpc)
    for rpc in SERVED
    for field in ("pod_sandbox_id", "container_id")
    if field in RPCS[rpc].input_type.fields_by_name
]
# These calls succeed if the object does not exist.
ENDS = {"StopPodSandbox", "RemovePodSandbox", "StopContainer", "RemoveContainer"}
# Fields that a request needs besides the id.
NEEDS: dict[str, dict[str, Any]] = {
    "CreateContainer": {
        "config": pb.ContainerConfig(metadata=pb.ContainerMetadata(name="vm", attempt=9), image=pb.ImageSpec(image="x"))
    },
    "ExecSync": {"cmd": ["true"]},
    "Exec": {"cmd": ["true"], "stdout": True},
    "Attach": {"stdout": True},
    "UpdateContainerResources": {"linux": pb.LinuxContainerResources()},
    "CheckpointContainer": {"location": "/var/lib/kubelet/checkpoints/x.tar"},
}


def ask(client: Client, rpc: str, field: str, value: str) -> tuple[Code, str]:
    request = getattr(pb, RPCS[rpc].input_type.name)(**{field: value}, **NEEDS.get(rpc, {}))
    try:
        getattr(client, rpc)(request)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return Code.OK, ""


def test_ids_are_64_hex_digits(client: Client) -> None:
    for made in client.running():
        assert re.fullmatch(r"[0-9a-f]{64}", made)


@pytest.mark.parametrize(("rpc", "field"), TAKES_ID)
def test_a_unique_prefix_works_in_place_of_the_id(client: Client, rpc: str, field: str) -> None:
    sandbox, made = client.running()
    code, words = ask(client, rpc, field, (made if field == "container_id" else sandbox)[:12])
    # The missing image is CreateContainer's only fault here.
    assert code not in (Code.INVALID_ARGUMENT, Code.NOT_FOUND) or words.startswith("image "), words
    if rpc in ENDS:
        assert all(item.state != pb.CONTAINER_RUNNING for item in client.containers())


@pytest.mark.parametrize(("rpc", "field"), TAKES_ID)
def test_an_ambiguous_prefix_is_refused_and_changes_nothing(
    client: Client, world: World, monkeypatch: pytest.MonkeyPatch, rpc: str, field: str
) -> None:
    ids = iter([f"a{n}".ljust(64, "0") for n in range(4)])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(ids))
    client.running("one")
    client.running("two")
    before = world.everything()
    code, words = ask(client, rpc, field, "a")
    assert (code, "ambiguous: 2 match" in words) == (Code.INVALID_ARGUMENT, True), words
    assert world.everything() == before


@pytest.mark.parametrize("value", ["0" * 64, "nonsense", "../x", "*"])
@pytest.mark.parametrize(("rpc", "field"), TAKES_ID)
def test_a_call_on_a_missing_object_is_not_found_unless_it_removes_the_object(
    shared: tuple[World, Client], rpc: str, field: str, value: str
) -> None:
    code, words = ask(shared[1], rpc, field, value)
    assert code is (Code.OK if rpc in ENDS else Code.NOT_FOUND), words


@pytest.mark.parametrize(("rpc", "field"), TAKES_ID)
def test_an_empty_id_is_refused_and_never_means_all(client: Client, world: World, rpc: str, field: str) -> None:
    client.running()
    before = world.everything()
    code, words = ask(client, rpc, field, "")
    assert (code, "id is empty" in words) == (Code.INVALID_ARGUMENT, True), words
    assert world.everything() == before
