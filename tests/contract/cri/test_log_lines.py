"""Each call logs one line, with the object's name and without any secret of the request."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import structlog
from fakes.cri import Client, pod, refused
from fakes.world import World
from structlog.testing import capture_logs

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.cri, pytest.mark.operator]


def logged() -> Any:
    return capture_logs(processors=[structlog.contextvars.merge_contextvars])


def of_calls(lines: list[Any], rpc: str) -> list[Any]:
    return [line for line in lines if line.get("rpc") == rpc and line["event"].startswith("rpc.")]


def test_a_call_logs_one_line_with_its_code_and_its_pod(world: World, client: Client) -> None:
    with logged() as lines:
        sandbox, container = client.running("web")
    for rpc, about in (
        ("RunPodSandbox", {"pod": "default/web"}),
        ("CreateContainer", {"pod": "default/web", "sandbox": sandbox[:20]}),
        ("StartContainer", {"pod": "default/web", "sandbox": sandbox[:20], "container": container[:20]}),
    ):
        (line,) = of_calls(lines, rpc)
        assert line["event"] == "rpc.done"
        assert line["code"] == "OK"
        assert line["ms"] >= 0
        assert about.items() <= line.items()


def test_a_failed_call_logs_one_line(world: World, client: Client) -> None:
    with logged() as lines, refused(grpc.StatusCode.NOT_FOUND):
        client.status("f" * 64)
    (line,) = of_calls(lines, "ContainerStatus")
    assert (line["event"], line["code"], line["container"]) == ("rpc.failed", "NOT_FOUND", "f" * 20)


def test_all_log_lines_of_a_call_name_its_pod(world: World, client: Client) -> None:
    _, container = client.running("web")
    with logged() as lines:
        client.stop(container)
    (ended,) = [line for line in lines if line["event"] == "container.exited"]
    assert ended["container"] == container[:20]
    assert [line for line in lines if line.get("rpc") == "StopContainer" and line.get("pod") != "default/web"] == []


@pytest.mark.hostile
def test_only_the_names_in_a_request_are_logged(world: World, client: Client) -> None:
    with logged() as lines:
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            annotations = {"VirtletCloudInitUserData": "password: hunter2\n\t:", "virtshim.io/nonsense": "x"}
            client.RunPodSandbox(pb.RunPodSandboxRequest(config=pod("web", annotations=annotations)))
        auth = pb.AuthConfig(username="me", password="hunter2")
        with refused(grpc.StatusCode.NOT_FOUND):
            spec = pb.ImageSpec(image="registry.test/vm/absent:1")
            client.PullImage(pb.PullImageRequest(image=spec, auth=auth))
    assert lines
    assert "hunter2" not in str([{key: value for key, value in line.items() if key != "error"} for line in lines])
    (pulled,) = of_calls(lines, "PullImage")
    assert pulled["image"] == "registry.test/vm/absent:1"
