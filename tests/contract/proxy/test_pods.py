"""The proxy routes pods, and later calls with their ids, to a runtime."""

import secrets
from typing import Any

import grpc
import pytest
from fakes.cri import Client, pod, refused
from fakes.runtime import FakeRuntime

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.proxy

TARGET = "kubernetes.io/target-runtime"


def run(client: Client, handler: str = "", **annotations: str) -> str:
    request = pb.RunPodSandboxRequest(config=pod(annotations=annotations), runtime_handler=handler)
    answer: pb.RunPodSandboxResponse = client.RunPodSandbox(request)
    return answer.pod_sandbox_id


@pytest.mark.parametrize(
    ("handler", "annotations", "owner"),
    [
        ("", {}, "primary"),
        ("runc", {}, "primary"),
        ("vm", {}, "other"),
        ("", {TARGET: "other"}, "other"),
        ("", {TARGET: "primary"}, "primary"),
        ("vm", {TARGET: "other"}, "other"),
        ("runc", {TARGET: "primary"}, "primary"),
    ],
)
def test_a_pod_is_routed_by_handler_then_annotation_then_to_the_primary(
    client: Client, primary: FakeRuntime, other: FakeRuntime, handler: str, annotations: Any, owner: str
) -> None:
    made = run(client, handler, **annotations)
    assert [made in runtime.pods for runtime in (primary, other)] == [owner == "primary", owner == "other"]


@pytest.mark.parametrize(
    ("handler", "value", "says"),
    [
        ("", "xen", "no runtime of this node is called 'xen'; known are primary, other"),
        ("", "", "no runtime of this node is called ''; known are primary, other"),
        (
            "vm",
            "primary",
            "'vm' belongs to the runtime other, but its annotation kubernetes.io/target-runtime asks for primary",
        ),
        (
            "runc",
            "other",
            "'runc' belongs to the runtime primary, but its annotation kubernetes.io/target-runtime asks for other",
        ),
    ],
)
def test_an_unknown_name_and_a_contradiction_are_refused(
    client: Client, primary: FakeRuntime, other: FakeRuntime, handler: str, value: str, says: str
) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, says):
        run(client, handler, **{TARGET: value})
    assert not primary.calls
    assert not other.calls


def test_later_calls_go_to_the_owner_of_the_pod_and_of_its_container(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    sandbox = run(client, "vm")
    container = client.create(sandbox)
    assert client.Exec(pb.ExecRequest(container_id=container)).url == "http://127.0.0.1:1/exec/other"
    client.stop(container)
    assert [call.method.rpartition("/")[2] for call in other.calls] == [
        "RunPodSandbox", "CreateContainer", "Exec", "StopContainer",
    ]  # fmt: skip
    assert primary.calls == []


def test_the_proxy_asks_for_the_owner_of_an_unknown_id_once(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    container = other.add_container(other.add_pod())
    primary.add_container(primary.add_pod())
    for _ in range(3):
        client.stop(container)
    assert len(other.asked("StopContainer")) == 3
    assert not primary.asked("StopContainer")
    assert len(primary.asked("ListContainers")) == 1


def test_a_prefix_of_an_id_is_enough(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    sandbox = other.add_pod()
    assert client.pod_status(sandbox[:13]).id == sandbox


def test_a_prefix_of_ids_of_two_runtimes_is_refused(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    sandbox = other.add_pod()
    primary.pods[sandbox[:20] + "0" * 44] = pb.PodSandbox(id=sandbox[:20] + "0" * 44)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "several runtimes have an id that begins with"):
        client.pod_status(sandbox[:20])


def test_the_primary_answers_for_ids_that_no_runtime_has(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    client.stop(secrets.token_hex(32))
    assert len(primary.asked("StopContainer")) == 1
    with refused(grpc.StatusCode.NOT_FOUND, "primary has no sandbox"):
        client.pod_status(secrets.token_hex(32))
    with refused(grpc.StatusCode.NOT_FOUND, "primary has no sandbox"):
        client.pod_status("")


def test_only_the_routing_fields_of_a_request_are_parsed(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    """The request has a field of a future CRI, and text that is not UTF-8 in a field that the proxy does not need."""
    unknown = b"\xfa\x3e\x03abc"
    config = pb.PodSandboxConfig(annotations={TARGET: "other"}).SerializeToString() + b"\x12\x02\xff\xfe" + unknown
    request = b"\x0a" + bytes([len(config)]) + config + unknown
    other.answers["RunPodSandbox"] = b"\x0a\x04made" + unknown
    call = client.channel.unary_unary("/runtime.v1.RuntimeService/RunPodSandbox")
    assert call(request, timeout=20) == b"\x0a\x04made" + unknown
    assert other.asked("RunPodSandbox")[0].request == request


def test_the_last_of_repeated_annotations_counts(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    first = pb.RunPodSandboxRequest(config=pod(annotations={TARGET: "primary"})).SerializeToString()
    second = pb.RunPodSandboxRequest(config=pb.PodSandboxConfig(annotations={TARGET: "other"})).SerializeToString()
    client.channel.unary_unary("/runtime.v1.RuntimeService/RunPodSandbox")(first + second, timeout=20)
    assert len(other.pods) == 1


@pytest.mark.parametrize("request_", [b"\xff", b"\x0a\x05abc", b"\x0b", b"\x0a\x04\x3a\xff\xff\xff", b"\x80" * 11])
@pytest.mark.parametrize("method", ["RunPodSandbox", "StopPodSandbox"])
def test_an_invalid_message_is_refused_and_reaches_no_runtime(
    client: Client, primary: FakeRuntime, other: FakeRuntime, request_: bytes, method: str
) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "send it as Kubernetes does"):
        client.channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")(request_, timeout=20)
    assert primary.calls == other.calls == []
