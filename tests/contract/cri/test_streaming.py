"""Exec, Attach and PortForward check their request and return a URL."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from fakes.cri import Client, refused
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.streaming.ports import AttachStreams, ExecRequest, ForwardRequest, Streams

pytestmark = pytest.mark.cri

Code = grpc.StatusCode


def with_stdin(client: Client, *, once: bool = False) -> tuple[str, str]:
    sandbox = client.run()
    made = client.create(sandbox, stdin=True, stdin_once=once)
    client.start(made)
    return sandbox, made


def exec_request(made: str, **changes: Any) -> pb.ExecRequest:
    return pb.ExecRequest(**{"container_id": made, "cmd": ["sh"], "stdout": True} | changes)


def attach_request(made: str, **changes: Any) -> pb.AttachRequest:
    return pb.AttachRequest(**{"container_id": made, "stdout": True} | changes)


def test_exec_offers_the_command_and_its_streams(client: Client, world: World) -> None:
    _, made = client.running()
    url = client.Exec(exec_request(made, cmd=["sh", "-c", "id"], stdin=True, stderr=True)).url
    assert url.startswith("http://127.0.0.1:")
    wanted = Streams(stdin=True, stdout=True, stderr=True)
    assert world.outside.streaming.offered == [ExecRequest(ContainerId(made), ("sh", "-c", "id"), wanted)]


@pytest.mark.parametrize("once", [False, True])
def test_attach_offers_the_console(client: Client, world: World, once: bool) -> None:
    _, made = with_stdin(client, once=once)
    assert client.Attach(attach_request(made, stdin=True, tty=True)).url
    wanted = Streams(stdin=True, stdout=True, tty=True)
    assert world.outside.streaming.offered == [AttachStreams(ContainerId(made), wanted, once)]


def test_input_to_a_container_without_stdin_is_refused(client: Client) -> None:
    _, made = client.running()
    with refused(Code.FAILED_PRECONDITION, "created without stdin"):
        client.Attach(attach_request(made, stdin=True))


def test_port_forward_offers_the_pods_own_address(client: Client, world: World) -> None:
    sandbox, _ = client.running()
    assert client.PortForward(pb.PortForwardRequest(pod_sandbox_id=sandbox, port=[80, 8080])).url
    address = client.pod_status(sandbox).network.ip
    assert world.outside.streaming.offered == [ForwardRequest(SandboxId(sandbox), address, (80, 8080))]


@pytest.mark.parametrize("make", [exec_request, attach_request])
@pytest.mark.parametrize(
    ("streams", "says"), [({"tty": True, "stderr": True}, "tty and stderr"), ({"stdout": False}, "no stream")]
)
def test_invalid_combinations_of_streams_are_refused(client: Client, make: Any, streams: Any, says: str) -> None:
    _, made = client.running()
    call = client.Exec if make is exec_request else client.Attach
    with refused(Code.INVALID_ARGUMENT, says):
        call(make(made, **streams))


def test_an_empty_command_is_invalid(client: Client) -> None:
    _, made = client.running()
    with refused(Code.INVALID_ARGUMENT, "command is empty"):
        client.Exec(exec_request(made, cmd=[]))


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_an_invalid_port_is_refused(client: Client, port: int) -> None:
    sandbox, _ = client.running()
    with refused(Code.INVALID_ARGUMENT, "port"):
        client.PortForward(pb.PortForwardRequest(pod_sandbox_id=sandbox, port=[port]))


def test_sessions_need_a_running_container(client: Client) -> None:
    sandbox = client.run()
    made = client.create(sandbox)
    with refused(Code.FAILED_PRECONDITION, "created, not running"):
        client.Exec(exec_request(made))
    client.start(made)
    client.stop(made)
    with refused(Code.FAILED_PRECONDITION, "exited, not running"):
        client.Attach(attach_request(made))


def test_ports_are_dialed_in_the_guest_of_a_pod_that_asks_for_it(client: Client, world: World) -> None:
    sandbox = client.run(annotations={"virtshim.io/forward": "agent"})
    with refused(Code.FAILED_PRECONDITION, "no running container"):
        client.PortForward(pb.PortForwardRequest(pod_sandbox_id=sandbox))
    made = client.create(sandbox)
    client.start(made)
    client.PortForward(pb.PortForwardRequest(pod_sandbox_id=sandbox))
    assert world.outside.streaming.offered[-1].inside == ContainerId(made)


def test_an_unknown_port_forward_mode_is_refused(client: Client) -> None:
    with refused(Code.INVALID_ARGUMENT, "neither address nor agent"):
        client.create(client.run(annotations={"virtshim.io/forward": "udp"}))


def test_a_stopped_pod_has_no_ports(client: Client) -> None:
    sandbox, _ = client.running()
    client.stop_pod(sandbox)
    with refused(Code.FAILED_PRECONDITION, "not ready"):
        client.PortForward(pb.PortForwardRequest(pod_sandbox_id=sandbox))


def test_sessions_end_with_their_container_and_port_forwards_with_their_pod(client: Client, world: World) -> None:
    sandbox, made = client.running()
    client.stop(made)
    assert world.outside.streaming.ended == [ContainerId(made)]
    client.stop_pod(sandbox)
    assert world.outside.streaming.ended == [ContainerId(made), SandboxId(sandbox)]


def test_a_pod_with_a_screen_forwards_to_it_while_its_vm_runs(client: Client, world: World) -> None:
    sandbox = client.run(annotations={"virtshim.io/vnc": "true"})
    client.PortForward(pb.PortForwardRequest(pod_sandbox_id=sandbox))
    made = client.create(sandbox)
    client.start(made)
    client.PortForward(pb.PortForwardRequest(pod_sandbox_id=sandbox))
    before, after = world.outside.streaming.offered
    assert (before.screen, after.screen) == (None, ContainerId(made))
