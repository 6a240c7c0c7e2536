"""Each life-cycle call has a defined answer, and a defined effect, for an object in each of its states.

A cell is `ok` or the code of a refusal, followed by the new state if it changed. A refusal never changes anything."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fakes.cri import Client, pod
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.cri

MISSING = "f" * 64
NUMBERS = itertools.count()


def table(text: str) -> list[Any]:
    """One parameter set (call, state, expected) per cell. Columns are separated by two or more blanks."""
    head, *rows = (re.split(r"\s{2,}", line.strip()) for line in text.strip().splitlines())
    return [
        pytest.param(row[0], state, cell, id=f"{row[0]}: {state}")
        for row in rows
        for state, cell in zip(head[1:], row[1:], strict=True)
    ]


def answer_to(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        assert error.details()
        return str(error.code().name)
    return "ok"


def check(world: World, call: Callable[[], object], state: Callable[[], str], expected: str) -> None:
    answer, _, after = expected.partition(" ")
    before, all_before = state(), world.everything()
    assert answer_to(call) == answer
    assert state() == (after or before)
    if answer != "ok":
        assert world.everything() == all_before


# --- containers


def container_in(client: Client, state: str) -> tuple[str, str]:
    sandbox = client.run(f"pod-{next(NUMBERS)}")
    if state == "missing":
        return sandbox, MISSING
    made = client.create(sandbox)
    if state in ("running", "exited"):
        client.start(made)
    if state == "exited":
        client.stop(made)
    if state == "removed":
        client.remove(made)
    return sandbox, made


def container_state(client: Client, sandbox: str) -> str:
    states = [item.state for item in client.containers(pod_sandbox_id=sandbox)]
    return pb.ContainerState.Name(states[0]).removeprefix("CONTAINER_").lower() if states else "gone"


def same(got: str, wanted: str) -> None:
    assert got == wanted


CONTAINER_CALLS: dict[str, Callable[[Client, str, str], object]] = {
    "CreateContainer": lambda client, sandbox, made: client.create(sandbox),
    "CreateContainer changed": lambda client, sandbox, made: client.create(sandbox, args=["other"]),
    "CreateContainer attempt 1": lambda client, sandbox, made: client.create(sandbox, "vm", 1),
    "StartContainer": lambda client, sandbox, made: client.start(made),
    "StopContainer": lambda client, sandbox, made: client.stop(made, 30),
    "RemoveContainer": lambda client, sandbox, made: client.remove(made),
    "ContainerStatus": lambda client, sandbox, made: same(client.status(made).id, made),
    "ReopenContainerLog": lambda client, sandbox, made: client.ReopenContainerLog(
        pb.ReopenContainerLogRequest(container_id=made)
    ),
    "UpdateContainerResources": lambda client, sandbox, made: client.UpdateContainerResources(
        pb.UpdateContainerResourcesRequest(container_id=made, linux=pb.LinuxContainerResources(cpu_quota=50_000))
    ),
    "ExecSync": lambda client, sandbox, made: client.ExecSync(pb.ExecSyncRequest(container_id=made, cmd=["true"])),
    "ContainerStats": lambda client, sandbox, made: client.ContainerStats(pb.ContainerStatsRequest(container_id=made)),
    "PodSandboxStats": lambda client, sandbox, made: client.PodSandboxStats(
        pb.PodSandboxStatsRequest(pod_sandbox_id=sandbox)
    ),
    "StopPodSandbox": lambda client, sandbox, made: client.stop_pod(sandbox),
    "RemovePodSandbox": lambda client, sandbox, made: client.remove_pod(sandbox),
}


@pytest.mark.parametrize(
    ("call", "state", "expected"),
    table("""
        call                       missing     created              running              exited               removed
        CreateContainer            ok created  ok                   ALREADY_EXISTS       ALREADY_EXISTS       ok created
        CreateContainer changed    ok created  ALREADY_EXISTS       ALREADY_EXISTS       ALREADY_EXISTS       ok created
        CreateContainer attempt 1  ok created  ok                   FAILED_PRECONDITION  ok                   ok created
        StartContainer             NOT_FOUND   ok running           FAILED_PRECONDITION  FAILED_PRECONDITION  NOT_FOUND
        StopContainer              ok          ok                   ok exited            ok                   ok
        RemoveContainer            ok          ok gone              ok gone              ok gone              ok
        ContainerStatus            NOT_FOUND   ok                   ok                   ok                   NOT_FOUND
        ReopenContainerLog         NOT_FOUND   FAILED_PRECONDITION  ok                   FAILED_PRECONDITION  NOT_FOUND
        UpdateContainerResources   NOT_FOUND   ok                   ok                   FAILED_PRECONDITION  NOT_FOUND
        ExecSync                   NOT_FOUND   FAILED_PRECONDITION  ok                   FAILED_PRECONDITION  NOT_FOUND
        ContainerStats             NOT_FOUND   ok                   ok                   ok                   NOT_FOUND
        PodSandboxStats            ok          ok                   ok                   ok                   ok
        StopPodSandbox             ok          ok                   ok exited            ok                   ok
        RemovePodSandbox           ok          ok gone              ok gone              ok gone              ok
    """),
)
def test_container_calls_in_every_state(shared: tuple[World, Client], call: str, state: str, expected: str) -> None:
    world, client = shared
    sandbox, made = container_in(client, state)
    check(
        world, lambda: CONTAINER_CALLS[call](client, sandbox, made), lambda: container_state(client, sandbox), expected
    )
    client.remove_pod(sandbox)
    assert world.everything() == []


# --- sandboxes


def sandbox_in(client: Client, state: str, name: str) -> str:
    if state == "missing":
        return MISSING
    sandbox = client.run(name)
    if state == "in use":
        client.start(client.create(sandbox))
    if state == "stopped":
        client.stop_pod(sandbox)
    if state == "removed":
        client.remove_pod(sandbox)
    return sandbox


def sandbox_state(client: Client, name: str) -> str:
    states = [item.state for item in client.pods() if item.metadata == pod(name).metadata]
    return pb.PodSandboxState.Name(states[0]).removeprefix("SANDBOX_").lower() if states else "gone"


SANDBOX_CALLS: dict[str, Callable[[Client, str, str], object]] = {
    "RunPodSandbox": lambda client, name, sandbox: client.run(name),
    "RunPodSandbox changed": lambda client, name, sandbox: client.run(name, hostname="other"),
    "RunPodSandbox attempt 1": lambda client, name, sandbox: client.remove_pod(client.run(name, 1)),
    "StopPodSandbox": lambda client, name, sandbox: client.stop_pod(sandbox),
    "RemovePodSandbox": lambda client, name, sandbox: client.remove_pod(sandbox),
    "PodSandboxStatus": lambda client, name, sandbox: same(client.pod_status(sandbox).id, sandbox),
    "CreateContainer": lambda client, name, sandbox: client.create(sandbox, "another"),
}


@pytest.mark.parametrize(
    ("call", "state", "expected"),
    table("""
        call                     missing    ready           in use               stopped              removed
        RunPodSandbox            ok ready   ok              ok                   ALREADY_EXISTS       ok ready
        RunPodSandbox changed    ok ready   ALREADY_EXISTS  ALREADY_EXISTS       ALREADY_EXISTS       ok ready
        RunPodSandbox attempt 1  ok         ok              ok                   ok                   ok
        StopPodSandbox           ok         ok notready     ok notready          ok                   ok
        RemovePodSandbox         ok         ok gone         ok gone              ok gone              ok
        PodSandboxStatus         NOT_FOUND  ok              ok                   ok                   NOT_FOUND
        CreateContainer          NOT_FOUND  ok              FAILED_PRECONDITION  FAILED_PRECONDITION  NOT_FOUND
    """),
)
def test_sandbox_calls_in_every_state(shared: tuple[World, Client], call: str, state: str, expected: str) -> None:
    world, client = shared
    name = f"pod-{next(NUMBERS)}"
    sandbox = sandbox_in(client, state, name)
    check(world, lambda: SANDBOX_CALLS[call](client, name, sandbox), lambda: sandbox_state(client, name), expected)
    for item in client.pods():
        client.remove_pod(item.id)
    assert world.everything() == []


# --- images


def image_in(world: World, client: Client, state: str, name: str) -> None:
    """An image in that state. `held`: removed, but a container still needs its file."""
    world.outside.files.publish(name, name.encode())
    if state == "missing":
        return
    client.pull(name)
    if state in ("in use", "held"):
        client.create(client.run("user-of-" + name.replace("/", "-").replace(":", "-")), image=pb.ImageSpec(image=name))
    if state in ("held", "removed"):
        client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=name)))


def image_state(world: World, client: Client, name: str) -> str:
    listed = client.ListImages(pb.ListImagesRequest(filter=pb.ImageFilter(image=pb.ImageSpec(image=name)))).images
    answered = client.ImageStatus(pb.ImageStatusRequest(image=pb.ImageSpec(image=name)))
    assert answered.HasField("image") == bool(listed)
    stored = world.outside.files.published[name].digest in world.outside.files.files
    return "here" if listed and stored else "held" if stored else "gone"


def create_from(client: Client, name: str) -> None:
    sandbox = client.run("creator")
    try:
        client.create(sandbox, image=pb.ImageSpec(image=name))
    finally:
        client.remove_pod(sandbox)


IMAGE_CALLS: dict[str, Callable[[Client, str], object]] = {
    "PullImage": lambda client, name: client.pull(name),
    "ImageStatus": lambda client, name: client.ImageStatus(pb.ImageStatusRequest(image=pb.ImageSpec(image=name))),
    "RemoveImage": lambda client, name: client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=name))),
    "CreateContainer": create_from,
}


@pytest.mark.parametrize(
    ("call", "state", "expected"),
    table("""
        call             missing    here     in use   held       removed
        PullImage        ok here    ok       ok       ok here    ok here
        ImageStatus      ok         ok       ok       ok         ok
        RemoveImage      ok         ok gone  ok held  ok         ok
        CreateContainer  NOT_FOUND  ok       ok       NOT_FOUND  NOT_FOUND
    """),
)
def test_image_calls_in_every_state(shared: tuple[World, Client], call: str, state: str, expected: str) -> None:
    world, client = shared
    name = f"registry.test/image-{next(NUMBERS)}:latest"
    image_in(world, client, state, name)
    check(world, lambda: IMAGE_CALLS[call](client, name), lambda: image_state(world, client, name), expected)
    for item in client.pods():
        client.remove_pod(item.id)
    client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=name)))
    assert world.everything() == world.leftovers() == []
