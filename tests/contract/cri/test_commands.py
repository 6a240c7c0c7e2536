"""kubelet sees the exit code and the state of a container's own command."""

from __future__ import annotations

import pytest
from fakes.cri import Client
from fakes.world import World
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.guest.command import EntrypointProgress, OutputPosition, StreamPosition
from virtshim.model.errors import WrongState
from virtshim.model.ids import ContainerId
from virtshim.streaming.ports import Output, OutStream

pytestmark = pytest.mark.cri

END = OutputPosition(StreamPosition(over=True), StreamPosition(over=True))


def exited(client: Client, made: str) -> pb.ContainerStatus:
    wait_until(lambda: client.status(made).state == pb.CONTAINER_EXITED, 10, "the container has ended")
    return client.status(made)


def test_the_exit_code_of_a_command_is_the_exit_code_of_its_container(client: Client, world: World) -> None:
    output = (Output(OutStream.STDOUT, b"fine\n"), Output(OutStream.STDERR, b"not so fine\n"))
    world.outside.guests.tell(0, EntrypointProgress(output, END, code=3))
    made = client.create(client.run(), command=["/bin/job"], args=["-v"])
    client.start(made)
    status = exited(client, made)
    assert (status.exit_code, status.reason, status.message) == (3, "Error", "")
    assert status.finished_at >= status.started_at > 0
    log = world.outside.entrypoint_logs.logs[status.log_path]
    assert log == ["stdout fine\n", "stderr not so fine\n"]
    assert world.outside.entrypoint_logs.finished == [status.log_path]
    (command,) = world.outside.guests.begun[ContainerId(made)]
    assert command.argv == ("/bin/job", "-v")


def test_a_command_that_exits_with_0_is_reported_as_completed(client: Client, world: World) -> None:
    world.outside.guests.tell(0, EntrypointProgress((), END, code=0))
    made = client.create(client.run(), args=["true"])
    client.start(made)
    status = exited(client, made)
    assert (status.exit_code, status.reason) == (0, "Completed")


def test_a_command_that_the_guest_cannot_run_ends_the_container_with_start_error(client: Client, world: World) -> None:
    world.outside.guests.begin_error = WrongState("the guest agent does not allow guest-exec")
    made = client.create(client.run(), command=["/bin/job"])
    client.start(made)
    status = exited(client, made)
    assert (status.exit_code, status.reason) == (128, "StartError")
    assert "does not allow guest-exec" in status.message


def test_a_container_with_a_running_command_is_stopped_and_removed(client: Client, world: World) -> None:
    sandbox = client.run()
    made = client.create(sandbox, command=["/bin/server"])
    client.start(made)
    wait_until(lambda: world.container(ContainerId(made)).status.command_begun, 10, "it has begun")
    assert client.status(made).state == pb.CONTAINER_RUNNING
    client.stop(made, 30)
    status = client.status(made)
    assert (status.exit_code, status.reason) == (137, "Error"), "it did not listen to its signal"
    assert world.outside.guests.signals == [15]
    client.remove_pod(sandbox)
    assert world.everything() == []
