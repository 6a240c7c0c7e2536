"""The dashboard learns the state of a node through the real CRI and admin sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fakes.background import Background
from fakes.cri import Client
from fakes.world import IMAGE, World
from podclient import wait_until

from virtshim.cli.run import wanted_vm
from virtshim.cli.staying import run_detached
from virtshim.cri.operator_client import operating
from virtshim.cri.operator_server import OperatorServer
from virtshim.dashboard.node_calls import NodeCalls
from virtshim.guest.operation import Action
from virtshim.model.errors import ShimError, WrongState

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


def test_operators_actions_before_and_after_the_dashboards_start_are_shown_once(
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


def test_the_dashboards_actions_are_those_of_the_commands(node: NodeCalls, client: Client, world: World) -> None:
    _, vm = client.running("web")
    assert "paused until it is resumed" in node.act(Action.PAUSE, vm)
    with pytest.raises(WrongState, match="virtshim resume"):
        node.act(Action.RESET, vm)
    assert "resumed" in node.act(Action.RESUME, vm)
    assert "its guest restarts" in node.act(Action.RESET, vm)
    with pytest.raises(WrongState, match="annotation"):
        node.screenshot(vm)


def test_stop_ends_a_vm_of_run_and_refuses_a_pod_of_kubernetes(node: NodeCalls, client: Client, admin: str) -> None:
    client.running("web")
    wanted = wanted_vm(IMAGE, "web", "64Mi", 0, [], [])
    own = run_detached(client.address.removeprefix("unix:"), admin, wanted, always_pull=False, quiet=True)
    pods = {pod.is_of_run: pod for pod in node.look().pods}
    with pytest.raises(WrongState, match="kubectl"):
        node.stop(pods[False].id)
    node.stop(pods[True].id)
    assert {vm.id: vm.state for vm in node.vms()} == {own: "exited", pods[False].vms[0].id: "running"}
