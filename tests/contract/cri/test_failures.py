"""If an external step fails, and perhaps its undo too, kubelet's own calls see and finish the rest."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from fakes.cri import Client, container
from fakes.lifecycle import CALLS, again, clear, new_name, picture, prepared, steps_of
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InternalError

pytestmark = pytest.mark.cri

MAKES = ("RunPodSandbox", "CreateContainer", "StartContainer")
UNDO = [
    *("networks.release", "vms.destroy", "vms.undefine", "disks.delete", "consoles.finish"),
    *(f"records.{table}.{verb}" for table in ("sandboxes", "containers") for verb in ("replace", "delete")),
]


def fails(client: Client, rpc: str, request: Any) -> bool:
    try:
        getattr(client, rpc)(request)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INTERNAL, error.details()
        assert "does not work today" in str(error.details())
        return True
    return False


def has_effect(what: str, after: bool) -> bool:
    """Whether the failed step had an effect: a failed transaction has none, and a console is never followed after a
    failure."""
    return what == "consoles.finish" or (after and not what.startswith("records"))


def finish(client: Client, rpc: str, request: Any, name: str) -> None:
    """What kubelet does: it repeats the call. If that is refused, it removes the object in the way and creates a new
    one."""
    try:
        again(client, rpc, request)
        return
    except grpc.RpcError as error:
        assert rpc in MAKES, error.details()
        assert error.code() in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.FAILED_PRECONDITION), error.details()
    if rpc == "RunPodSandbox":
        assert picture(client, name) == "notready"
        clear(client)
        client.run(name)
        return
    (sandbox,) = (item.id for item in client.pods() if item.metadata.name == name)
    for item in client.containers(pod_sandbox_id=sandbox):
        assert item.state in (pb.CONTAINER_EXITED, pb.CONTAINER_UNKNOWN)
        client.remove(item.id)
    made = client.create(sandbox, metadata=container(attempt=1).metadata)
    if rpc == "StartContainer":
        client.start(made)


@pytest.mark.parametrize("after", [False, True], ids=["no effect", "effect"])
@pytest.mark.parametrize("rpc", list(CALLS))
def test_kubelet_can_finish_a_call_after_any_step_failed(shared: tuple[World, Client], rpc: str, after: bool) -> None:
    world, client = shared
    failed = 0
    for step in steps_of(world, client, rpc):
        for undo in [None, *UNDO] if rpc in MAKES else [None]:
            if undo == step:
                continue
            name = new_name()
            request = prepared(world, client, rpc, name)
            for what in filter(None, (step, undo)):
                trouble = InternalError(f"{what} does not work today")
                world.journal.fail(what, trouble, after=has_effect(what, after))
            failed += fails(client, rpc, request)
            world.journal.heal()
            where = f"{step} failed, then {undo}"
            assert world.leftovers() == [], where
            finish(client, rpc, request, name)
            assert picture(client, name) == CALLS[rpc].after, where
            clear(client)
            assert world.everything() == [], where
    assert failed
