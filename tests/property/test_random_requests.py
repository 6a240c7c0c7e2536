"""Every implemented RPC soon answers a random valid message, or refuses it with a message."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.cri import Client, container, pod, served
from fakes.examples import examples
from fakes.world import IMAGE, World
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from criproto.runtime_v1 import api_pb2 as pb

SERVICES = [pb.DESCRIPTOR.services_by_name[name] for name in ("RuntimeService", "ImageService")]
RPCS = {method.name: method for service in SERVICES for method in service.methods}
CALL_SECONDS = 10.0

# An answer to any request is one of these; UNKNOWN and INTERNAL would be a bug of ours.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}

TEXTS = [
    *("", "web", IMAGE, "sha256:" + "0" * 64, "0" * 64, "a", "/", "..", "../../x", "/var/log/pods/x", "vm/0.log"),
    *("\0", "a\nb", "ünï\U0001f600", "%s%n", "x" * 5000, "VirtletVCPUCount", "VirtletCloudInitUserData", "{a: [", "-1"),
    *("\ufeff", "\u2028", "\x7f", "virtshim", "io.kubernetes.pod.name", "12345678-9abc-4def-8123-456789abcdef"),
]
# Grace periods and time limits stay small enough for the clock; all other numbers go to their limits.
SMALL = {"timeout"}

Make = Callable[[FieldDescriptor], st.SearchStrategy[Any]]


def texts() -> st.SearchStrategy[str]:
    return st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def whole_numbers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.sampled_from([low, high, 0, 1]) | st.integers(low, high)


SCALARS: dict[int, Make] = {
    FieldDescriptor.TYPE_STRING: lambda field: texts(),
    FieldDescriptor.TYPE_BYTES: lambda field: st.binary(max_size=12),
    FieldDescriptor.TYPE_BOOL: lambda field: st.booleans(),
    FieldDescriptor.TYPE_INT32: lambda field: whole_numbers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: lambda field: whole_numbers(0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: lambda field: whole_numbers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: lambda field: whole_numbers(0, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: lambda field: st.floats(),
    # Numbers that the enum does not know are legal on the wire.
    FieldDescriptor.TYPE_ENUM: lambda field: (
        st.sampled_from([value.number for value in field.enum_type.values]) | st.just(77)
    ),
}


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """Any message of that type; deeper levels are emptier."""
    made = getattr(pb, descriptor.name)()
    for field in descriptor.fields:
        if draw(st.integers(0, 3 + depth)) > 2 - (depth == 0):
            continue
        if is_map(field):
            fill_map(draw, made, field)
        elif field.is_repeated:
            for value in draw(st.lists(values(field, depth), max_size=2)):
                getattr(made, field.name).append(value)
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(draw(messages(field.message_type, depth + 1)))
        else:
            setattr(made, field.name, draw(values(field, depth)))
    return made


def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if field.name in SMALL:
        return st.integers(-5, 60)
    return SCALARS[field.type](field)


def fill_map(draw: st.DrawFn, made: Message, field: FieldDescriptor) -> None:
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    assert value.message_type is None, "CRI has no maps of messages in requests"
    for one in draw(st.dictionaries(SCALARS[key.type](key), SCALARS[value.type](value), max_size=3)).items():
        getattr(made, field.name)[one[0]] = one[1]


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[World, Client]]:
    directory = tempfile.mkdtemp(prefix="random-requests-")
    with served(Path(directory)) as (world, client, _):
        world.pull()
        for name in ("one", "two", "three"):
            client.running(name)
        yield world, client
    shutil.rmtree(directory)


def answered(client: Client, rpc: str, request: Message) -> Any:
    """The answer, None if the call was refused. Fails for a crash, a hang, or a refusal without a message."""
    try:
        answer = getattr(client, rpc)(request, timeout=CALL_SECONDS)
        return list(answer) if RPCS[rpc].server_streaming else answer
    except grpc.RpcError as error:
        refusal = error
    assert refusal.code() in REFUSALS, f"{rpc}: {refusal.code()} {refusal.details()}\n{request}"
    assert refusal.details()
    return None


def lists_answer(client: Client) -> None:
    for item in client.pods():
        assert item.HasField("metadata")
        assert client.pod_status(item.id).created_at == item.created_at
    for item in client.containers():
        assert item.HasField("metadata")
        assert client.status(item.id).image_ref


def real_ids(world: World) -> tuple[list[str], list[str]]:
    return (
        [sandbox.id.value for sandbox in world.records.sandboxes.all()],
        [one.id.value for one in world.records.containers.all()],
    )


BOUNDED = settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.parametrize("rpc", sorted(set(RPCS) - {"GetContainerEvents"}))  # whose request is empty and answer endless
def test_any_message_is_answered_or_refused(node: tuple[World, Client], rpc: str) -> None:
    world, client = node

    @given(st.data())
    @BOUNDED
    def holds(data: st.DataObject) -> None:
        request = data.draw(messages(RPCS[rpc].input_type))
        sandboxes, containers = real_ids(world)
        for field, ids in (("pod_sandbox_id", sandboxes), ("container_id", containers)):
            chosen = data.draw(st.none() | st.integers(0, 100))  # does not depend on what happens to be there
            if field in RPCS[rpc].input_type.fields_by_name and ids and chosen is not None:
                setattr(request, field, ids[chosen % len(ids)])
        answered(client, rpc, request)

    holds()
    lists_answer(client)
    assert world.leftovers() == []


def keep_few(world: World, client: Client) -> None:
    """Keeps lists short, so that each example costs the same."""
    for sandbox in world.records.sandboxes.all()[4:]:
        client.remove_pod(sandbox.id.value)


def test_a_good_request_with_one_random_part_is_answered_or_refused(node: tuple[World, Client]) -> None:
    """Entirely random messages rarely pass the first checks; these do, and reach the services."""
    world, client = node
    world.pull()
    count = iter(range(1_000_000))

    @given(st.data())
    @settings(BOUNDED, max_examples=examples(100))
    def holds(data: st.DataObject) -> None:
        world.pull()
        config = pod(f"pod-{os.getpid()}-{next(count)}")
        mutate(data, config)
        made = answered(client, "RunPodSandbox", pb.RunPodSandboxRequest(config=config))
        if made is None:
            return
        assert client.pod_status(made.pod_sandbox_id).metadata == config.metadata
        assert dict(client.pod_status(made.pod_sandbox_id).annotations) == dict(config.annotations)
        inner = container()
        mutate(data, inner)
        request = pb.CreateContainerRequest(pod_sandbox_id=made.pod_sandbox_id, config=inner)
        created = answered(client, "CreateContainer", request)
        if created is not None:
            assert dict(client.status(created.container_id).labels) == dict(inner.labels)
            answered(client, "StartContainer", pb.StartContainerRequest(container_id=created.container_id))
            grace = data.draw(st.integers(-5, 60))
            answered(client, "StopContainer", pb.StopContainerRequest(container_id=created.container_id, timeout=grace))
        lists_answer(client)
        keep_few(world, client)

    holds()
    for sandbox in client.pods():
        client.remove_pod(sandbox.id)
    assert world.everything() == []


def mutate(data: st.DataObject, message: Any) -> None:
    """Replaces one field by something random."""
    field = data.draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    random_one = data.draw(messages(message.DESCRIPTOR))
    if field.name == "metadata" and not random_one.HasField("metadata"):
        return
    message.ClearField(field.name)
    part = type(message)()
    for set_field, value in random_one.ListFields():
        if set_field.name != field.name:
            continue
        if is_map(set_field):
            getattr(part, set_field.name).update(value)
        elif set_field.is_repeated:
            getattr(part, set_field.name).extend(value)
        elif set_field.message_type is not None:
            getattr(part, set_field.name).CopyFrom(value)
        else:
            setattr(part, set_field.name, value)
    message.MergeFrom(part)
