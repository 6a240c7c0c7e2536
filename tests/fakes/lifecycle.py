"""The calls that change a pod, with their preconditions and results, and the external steps of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from fakes.cri import Client, container, pod
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Call:
    """`request` makes the preconditions and returns the message; `after` is the `picture` after the call."""

    request: Callable[[Client, str], Any]
    after: str


CALLS = {
    "RunPodSandbox": Call(lambda client, name: pb.RunPodSandboxRequest(config=pod(name)), "ready"),
    "CreateContainer": Call(
        lambda client, name: pb.CreateContainerRequest(pod_sandbox_id=client.run(name), config=container()),
        "ready created",
    ),
    "StartContainer": Call(
        lambda client, name: pb.StartContainerRequest(container_id=client.create(client.run(name))), "ready running"
    ),
    "StopContainer": Call(
        lambda client, name: pb.StopContainerRequest(container_id=client.running(name)[1], timeout=30), "ready exited"
    ),
    "RemoveContainer": Call(
        lambda client, name: pb.RemoveContainerRequest(container_id=client.running(name)[1]), "ready"
    ),
    "StopPodSandbox": Call(
        lambda client, name: pb.StopPodSandboxRequest(pod_sandbox_id=client.running(name)[0]), "notready exited"
    ),
    "RemovePodSandbox": Call(
        lambda client, name: pb.RemovePodSandboxRequest(pod_sandbox_id=client.running(name)[0]), ""
    ),
}


def new_name() -> str:
    return f"pod-{next(_NUMBERS)}"


def picture(client: Client, name: str) -> str:
    """The states of a pod and its containers, as listed."""
    pods = [item for item in client.pods() if item.metadata.name == name]
    states = [pb.PodSandboxState.Name(item.state) for item in pods]
    states += [pb.ContainerState.Name(c.state) for item in pods for c in client.containers(pod_sandbox_id=item.id)]
    return " ".join(state.partition("_")[2].lower() for state in states)


def prepared(world: World, client: Client, rpc: str, name: str) -> Any:
    """The message of a call, after its preconditions and what virtshim does because of their events."""
    request = CALLS[rpc].request(client, name)
    world.outside.vms.settle()
    return request


def steps_of(world: World, client: Client, rpc: str) -> list[str]:
    """The external calls that it makes, each once, taken from a run; a new step is included automatically."""
    request = prepared(world, client, rpc, new_name())
    world.journal.calls.clear()
    getattr(client, rpc)(request)
    steps = list(dict.fromkeys(world.journal.calls))
    assert steps
    clear(client)
    return steps


def again(client: Client, rpc: str, request: Any) -> None:
    """Repeats as kubelet, which treats a running container as started."""
    try:
        getattr(client, rpc)(request)
    except grpc.RpcError as error:
        if rpc != "StartContainer" or "is running" not in str(error.details()):
            raise


def clear(client: Client) -> None:
    for item in client.pods():
        client.remove_pod(item.id)
