"""A guest gets its pod's sysctls and its links to block volumes before anything of the container runs there."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Callable

import pytest
from fakes.waiting import eventually
from fakes.world import World, container_config, sandbox_config

from virtshim.devices.guest_view import GUEST_LINKS_NOT_LINKED, guest_links_command
from virtshim.devices.values import BlockDevice, CriDevice
from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.guest.set_up_scripts import (
    NO_IP_COMMAND,
    POLICY_ROUTES_NOT_YET,
    SYSCTLS_NOT_SET,
    policy_routes_command,
    sysctls_command,
)
from virtshim.model.container import ExitReason
from virtshim.model.errors import InvalidRequest, Unavailable, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.network import Interface, PodNetwork, PolicyRule, TableRoute
from virtshim.pods.ports import AttachRequest
from virtshim.streaming.ports import ExecRequest, Streams

SYSCTLS = {"net.core.somaxconn": "321"}
SCRIPT = sysctls_command(SYSCTLS)


def running(world: World, *command: str) -> ContainerId:
    pod = world.run(config=sandbox_config(sysctls=SYSCTLS))
    made = world.create(pod, config=container_config(command=command))
    world.start(made)
    return made


def settled() -> bool:
    return not [one for one in threading.enumerate() if one.name.startswith("set-up-")]


def ran(world: World) -> list[tuple[str, ...]]:
    return [command.argv for command in world.outside.guests.commands]


def exec_sync(world: World, made: ContainerId) -> CommandResult:
    return world.do.exec_command.run(world.container(made), ("true",), 60.0, threading.Event())


def lacks_it(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
    if command.argv == SCRIPT:
        return CommandResult(
            SYSCTLS_NOT_SET, b"", b"net.core.somaxconn: the guest's kernel does not have it, or not yet\n"
        )
    return CommandResult(0, b"", b"")


def test_the_seed_has_the_sysctls_for_cloud_init(world: World) -> None:
    made = world.create(world.run(config=sandbox_config(sysctls=SYSCTLS)))
    assert world.outside.seeds.requests[made].sysctls == SYSCTLS


def test_the_agent_sets_sysctls_and_again_after_a_guest_restart(world: World) -> None:
    made = running(world)
    eventually(lambda: ran(world) == [SCRIPT] and settled())
    world.app.guest_set_up.changed(world.domain(made))
    eventually(lambda: ran(world) == [SCRIPT, SCRIPT])


def test_a_guest_that_restarts_during_set_up_is_set_up_again(world: World) -> None:
    def restarts_once(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        if len(ran(world)) == 1:
            (container,) = world.records.containers.all()
            world.app.guest_set_up.changed(container.domain_uuid)
        return CommandResult(0, b"", b"")

    world.outside.guests.do = restarts_once
    running(world)
    eventually(settled)
    assert ran(world) == [SCRIPT, SCRIPT]


def test_sysctls_are_set_before_the_containers_command_begins(world: World) -> None:
    set_before = []

    def notes(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        set_before.append(dict(world.outside.guests.begun))
        return CommandResult(0, b"", b"")

    world.outside.guests.do = notes
    made = running(world, "serve")
    eventually(lambda: world.container(made).status.command_begun)
    assert set_before == [{}]


def test_sysctls_are_set_once_before_exec_commands(world: World) -> None:
    made = running(world, "serve")
    eventually(lambda: world.container(made).status.command_begun)
    world = world.recovered()  # which remembers nothing of it
    try:
        world.outside.guests.commands.clear()
        exec_sync(world, made)
        exec_sync(world, made)
        assert [argv[0] for argv in ran(world)] == [SCRIPT[0], "true", "true"]
    finally:
        world.close()


def exec_streams(world: World, made: ContainerId) -> None:
    """The fake has no sessions to hand out."""
    with pytest.raises(Unavailable, match="no guest agent answers"):
        asyncio.run(world.do.exec_command.start(ExecRequest(made, ("true",), Streams(stdout=True))))


def test_sysctls_are_set_once_before_exec_sessions(world: World) -> None:
    made = running(world, "serve")
    eventually(lambda: world.container(made).status.command_begun)
    world = world.recovered()  # which remembers nothing of it
    try:
        world.outside.guests.commands.clear()
        exec_streams(world, made)
        exec_streams(world, made)
        assert [argv[0] for argv in ran(world)] == [SCRIPT[0], "true", "true"]
    finally:
        world.close()


def test_sessions_that_begin_together_share_one_set_up(world: World) -> None:
    made = running(world, "serve")
    eventually(lambda: world.container(made).status.command_begun)
    world = world.recovered()
    try:
        world.outside.guests.commands.clear()
        may_go = threading.Event()

        def waits(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
            assert may_go.wait(60)
            return CommandResult(0, b"", b"")

        world.outside.guests.do = waits
        first, second = (world.app.guest_set_up.before_session(world.container(made)) for _ in range(2))
        eventually(lambda: ran(world) == [SCRIPT])
        may_go.set()
        assert (first.result(60), second.result(60), ran(world)) == (None, None, [SCRIPT])
    finally:
        world.close()


def test_a_session_begins_even_if_sysctls_cannot_be_set(world: World) -> None:
    made = running(world)
    eventually(settled)
    world.outside.guests.do = lacks_it
    world.app.guest_set_up.changed(world.domain(made))
    eventually(settled)
    exec_streams(world, made)
    assert ran(world)[-1] == ("true",)


def test_an_agent_that_does_not_come_up_is_waited_for_once(world: World) -> None:
    made = running(world, "serve")
    eventually(lambda: world.container(made).status.command_begun)
    world = world.recovered()
    try:
        world.outside.guests.waits.clear()

        def is_silent(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
            raise WrongState("timed out waiting for the guest agent")

        world.outside.guests.do = is_silent
        with pytest.raises(WrongState, match="timed out"):
            asyncio.run(world.do.exec_command.start(ExecRequest(made, ("true",), Streams(stdout=True))))
        with pytest.raises(WrongState, match="timed out"):
            world.do.exec_command.run(world.container(made), ("true",), 0.0, threading.Event())
        assert len(world.outside.guests.waits) == 2
    finally:
        world.close()


def test_a_refused_sysctl_fails_the_start_of_the_containers_command(world: World) -> None:
    world.outside.guests.do = lacks_it
    made = running(world, "serve")
    eventually(lambda: world.container(made).status.ending is not None or world.container(made).exit is not None)
    how = world.container(made).exit or world.container(made).status.ending
    assert how is not None
    assert how.reason is ExitReason.START_ERROR
    assert "securityContext.sysctls" in how.message
    assert "net.core.somaxconn" in how.message
    assert made not in world.outside.guests.begun


def test_without_a_command_a_refused_sysctl_is_in_the_containers_message(world: World) -> None:
    world.outside.guests.do = lacks_it
    made = running(world)
    eventually(lambda: world.app.watch.look() or world.container(made).status.trouble)
    assert "securityContext.sysctls cannot be set in the guest: net.core" in world.container(made).status.trouble
    assert exec_sync(world, made).code == 0, "who looks into it can"


def test_a_guest_whose_agent_may_not_run_commands_is_left_to_cloud_init(world: World) -> None:
    def refuses(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        raise WrongState("the agent may not run commands")

    world.outside.guests.do = refuses
    made = running(world)
    eventually(settled)
    world.app.watch.look()
    assert world.container(made).status.trouble == ""


# --- policy routes


ROUTED = Interface(
    "net1",
    "0a:58:00:00:00:02",
    1500,
    ("10.90.9.2/32",),
    rules=(PolicyRule(4, 32765, 100, "10.90.9.2/32"),),
    table_routes=(TableRoute(100, "0.0.0.0/0", "10.90.9.1"),),
)
ROUTES = policy_routes_command((ROUTED,))


def routed(world: World, *command: str) -> ContainerId:
    """One of a pod whose second network has rules."""
    attach = world.outside.networks.attach

    def with_second(request: AttachRequest, timeout: float) -> PodNetwork:
        network = attach(request, timeout)
        return dataclasses.replace(network, interfaces=(*network.interfaces, ROUTED))

    world.outside.networks.attach = with_second  # type: ignore[method-assign]
    made = world.create(world.run(), config=container_config(command=command))
    world.start(made)
    return made


def ends_with(code: int, said: bytes, times: int = 1_000_000) -> Callable[..., CommandResult]:
    """Of the routes' script, so often; all else succeeds."""
    ended = itertools.count()

    def do(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        fails = command.argv == ROUTES and next(ended) < times
        return CommandResult(code, b"", said) if fails else CommandResult(0, b"", b"")

    return do


def test_the_agent_sets_policy_routes_and_again_after_a_guest_restart(world: World) -> None:
    made = routed(world)
    eventually(lambda: ran(world) == [ROUTES] and settled())
    world.app.guest_set_up.changed(world.domain(made))
    eventually(lambda: ran(world) == [ROUTES, ROUTES])


def test_the_command_begins_once_the_network_is_up_and_policy_routes_are_set(world: World) -> None:
    world.outside.guests.do = ends_with(POLICY_ROUTES_NOT_YET, b"eth1 does not have the address 10.90.9.2\n", times=3)
    made = routed(world, "serve")
    eventually(lambda: world.container(made).status.command_begun)
    assert ran(world) == [ROUTES] * 4


def test_exec_does_not_wait_for_the_guests_network(world: World) -> None:
    world.outside.clock.held = True  # else the time for the network to come is over at once
    world.outside.guests.do = ends_with(POLICY_ROUTES_NOT_YET, b"no interface has the MAC 0a:58:00:00:00:02\n")
    made = routed(world, "serve")
    eventually(lambda: ran(world))
    assert exec_sync(world, made).code == 0
    exec_streams(world, made)
    assert not world.container(made).status.command_begun


def test_a_network_that_never_comes_up_is_in_the_containers_message(world: World) -> None:
    world.outside.guests.do = ends_with(POLICY_ROUTES_NOT_YET, b"no interface has the MAC 0a:58:00:00:00:02\n")
    made = routed(world)
    eventually(lambda: world.app.watch.look() or world.container(made).status.trouble)
    assert world.container(made).status.trouble == (
        "policy routes (CNI's sbr) cannot be set in the guest: no interface has the MAC 0a:58:00:00:00:02; see whether the guest "
        "has configured its NICs"
    )


def test_an_image_without_ip_fails_the_start_of_the_containers_command(world: World) -> None:
    world.outside.guests.do = ends_with(NO_IP_COMMAND, b"the image has no command ip\n")
    made = routed(world, "serve")
    eventually(lambda: world.container(made).status.ending is not None or world.container(made).exit is not None)
    how = world.container(made).exit or world.container(made).status.ending
    assert how is not None
    assert how.reason is ExitReason.START_ERROR
    assert "the image has no command ip; use an image with iproute2" in how.message
    assert made not in world.outside.guests.begun


def test_policy_routes_that_the_agent_may_not_set_are_reported(world: World) -> None:
    def refuses(command: GuestCommand, timeout: float, cancelled: threading.Event) -> CommandResult:
        raise WrongState("the agent may not run commands")

    world.outside.guests.do = refuses
    made = routed(world)
    eventually(lambda: world.app.watch.look() or world.container(made).status.trouble)
    assert world.container(made).status.trouble == (
        "policy routes (CNI's sbr) are not set in the guest: the agent may not run commands; use an image whose guest agent may "
        "run commands"
    )


def test_block_volumes_are_linked_to_their_paths_by_cloud_init_and_by_the_agent(world: World) -> None:
    devices = (
        CriDevice("/dev/block/a", "/dev/xvda"),
        CriDevice("/dev/block/root", "/"),
        CriDevice("/dev/block/b", "/srv/b"),
    )
    made = world.create(world.run(), config=container_config(devices=devices))
    linked = (BlockDevice("/dev/block/a", "/dev/xvda"), BlockDevice("/dev/block/b", "/srv/b"))
    assert world.outside.seeds.requests[made].blocks == linked
    world.start(made)
    eventually(lambda: ran(world) == [guest_links_command(linked)])
    assert ran(world)[0][4:] == ("dev-xvda", "/dev/xvda", "srv-b", "/srv/b")


def test_a_device_path_that_the_guest_already_uses_is_reported(world: World) -> None:
    taken = CommandResult(GUEST_LINKS_NOT_LINKED, b"", b"/dev/vda: the guest has something else there\n")
    world.outside.guests.do = lambda command, timeout, cancelled: taken
    made = world.create(world.run(), config=container_config(devices=(CriDevice("/dev/block/a", "/dev/vda"),)))
    world.start(made)
    eventually(lambda: world.app.watch.look() or world.container(made).status.trouble)
    assert (
        "/dev/vda: the guest has something else there; use another devicePath" in world.container(made).status.trouble
    )


@pytest.mark.parametrize("path", ["data", "/proc/data", "/dev", "/a/../etc/passwd", "/a\nb", "/" + "a" * 5000])
def test_an_impossible_device_path_is_refused_by_name(world: World, path: str) -> None:
    config = container_config(devices=(CriDevice("/dev/block/a", path),))
    with pytest.raises(InvalidRequest, match=r"config\.devices\[container_path .*(use another|correct) devicePath"):
        world.create(world.run(), config=config)


def test_one_device_path_twice_is_refused(world: World) -> None:
    config = container_config(devices=(CriDevice("/dev/block/a", "/dev/x"), CriDevice("/dev/block/b", "/dev//x")))
    with pytest.raises(InvalidRequest, match="is requested twice"):
        world.create(world.run(), config=config)
