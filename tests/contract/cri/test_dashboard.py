"""What the dashboard learns of a node, over the real CRI and admin sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fakes.background import Background
from fakes.cri import Client
from fakes.world import World
from podclient import wait_until

from virtshim.cri.operator_client import operating
from virtshim.cri.operator_server import OperatorServer
from virtshim.dashboard.node_calls import NodeCalls
from virtshim.guest.operation import Action
from virtshim.model.errors import ShimError

pytestmark = pytest.mark.cri


@pytest.fixture
def admin(client: Client, world: World) -> Iterator[str]:
    """The admin socket, beside the CRI socket."""
    path = f"{os.path.dirname(client.address.removeprefix('unix:'))}/admin.sock"
    server = OperatorServer(path, world.app.operator)
    server.start()
    yield path
    server.stop(0)


@pytest.fixture
def node(client: Client, admin: str) -> Iterator[NodeCalls]:
    calls = NodeCalls(client.address.removeprefix("unix:"))
    yield calls
    calls.close()


def states(node: NodeCalls) -> list[str]:
    return [vm.shown_state for pod in node.look().pods for vm in pod.vms]


def test_a_paused_vm_is_seen_as_paused(node: NodeCalls, client: Client, admin: str) -> None:
    _, vm = client.running("web")
    assert states(node) == ["running"]
    with operating(admin) as operator:
        operator.act(Action.PAUSE, vm)
        wait_until(lambda: states(node) == ["paused"], 20, "it is seen as paused")
        operator.act(Action.RESUME, vm)
    wait_until(lambda: states(node) == ["running"], 20, "it is seen as running")


def test_operators_actions_before_and_after_the_dashboards_start_are_told_once(
    node: NodeCalls, client: Client, admin: str
) -> None:
    pod, vm = client.running("web")
    told: list[tuple[str, str]] = []

    def follow() -> None:
        node.follow_actions(lambda kind, _at, pod, _text: told.append((kind, pod)))

    with operating(admin) as operator:
        operator.act(Action.PAUSE, vm)
        following = Background(follow)
        wait_until(lambda: told == [("pause", pod)], 20, "the pause is told")
        operator.act(Action.RESUME, vm)
        wait_until(lambda: len(told) == 2, 20, "the resume is told")
    node.close()
    with pytest.raises(ShimError):
        following.done()
    assert told == [("pause", pod), ("resume", pod)]
