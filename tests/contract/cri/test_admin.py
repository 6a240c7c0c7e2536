"""virtshim's own commands use calls beside CRI, for example to add SSH keys to a running guest."""

from __future__ import annotations

import grpc
import pytest
from fakes.cri import CALL_SECONDS, Client, refused
from fakes.world import World

from criproto.admin_v1 import admin_pb2, admin_pb2_grpc
from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import NotFound

pytestmark = pytest.mark.cri

Code = grpc.StatusCode
KEYS = ["ssh-ed25519 AAAA me@here", "ssh-rsa BBBB"]


def add(client: Client, vm: str, user: str = "root", keys: list[str] = KEYS) -> None:
    request = admin_pb2.AddSshKeysRequest(container_id=vm, user=user, keys=keys)
    admin_pb2_grpc.AdminStub(client.channel).AddSshKeys(request, timeout=CALL_SECONDS)


def test_keys_reach_the_guest(client: Client, world: World) -> None:
    _, vm = client.running()
    add(client, vm)
    assert world.outside.guests.ssh_keys == [("root", key) for key in KEYS]


def test_adding_keys_for_a_user_that_the_guest_lacks_returns_not_found(client: Client, world: World) -> None:
    _, vm = client.running()
    world.journal.fail("guest_operations.add_ssh_keys", NotFound("failed to look up user"))
    with refused(Code.NOT_FOUND, "look up user"):
        add(client, vm)


@pytest.mark.parametrize(
    ("user", "keys"), [("a b", KEYS), ("", KEYS), ("root", []), ("root", ["# none"]), ("root", ["key\nssh-rsa BBBB"])]
)
def test_invalid_users_and_keys_are_refused(client: Client, user: str, keys: list[str]) -> None:
    _, vm = client.running()
    with refused(Code.INVALID_ARGUMENT, ""):
        add(client, vm, user, keys)


def test_only_a_running_vm_takes_keys(client: Client) -> None:
    with refused(Code.FAILED_PRECONDITION, "created"):
        add(client, client.create(client.run()))
    with refused(Code.NOT_FOUND, "no such container"):
        add(client, "f" * 64)


def console(client: Client, vm: str, *, stdin: bool = False) -> str:
    request = admin_pb2.AttachConsoleRequest(container_id=vm, stdin=stdin)
    return admin_pb2_grpc.AdminStub(client.channel).AttachConsole(request, timeout=CALL_SECONDS).url


def test_a_container_with_a_command_still_has_its_serial_console(client: Client, world: World) -> None:
    sandbox = client.run()
    vm = client.create(sandbox, command=["job"], stdin=True)
    client.start(vm)
    assert console(client, vm, stdin=True).startswith("http://127.0.0.1:")
    client.Attach(pb.AttachRequest(container_id=vm, stdin=True, stdout=True))
    people, kubelet = world.outside.streaming.offered
    assert (people.to_entrypoint, kubelet.to_entrypoint) == (False, True)


def test_a_console_without_stdin_is_read_only(client: Client) -> None:
    _, vm = client.running()
    assert console(client, vm)
    with refused(Code.FAILED_PRECONDITION, "without stdin"):
        console(client, vm, stdin=True)
