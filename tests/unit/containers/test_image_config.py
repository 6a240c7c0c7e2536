"""An image's OCI config applies where the pod sets nothing, as in a container."""

from __future__ import annotations

import pytest
from fakes.world import World, container_config, sandbox_config

from virtshim.guest.command import entrypoint_command, in_container
from virtshim.model.container import Container, RunAs
from virtshim.model.image import ImageConfig

OURS = "registry.test/vm/server:1"
SAYS = ImageConfig(
    user="app:7",
    env=("PATH=/opt/bin", "MODE=from image", "EMPTY="),
    entrypoint=("/bin/server", "--foreground"),
    cmd=("--port", "80"),
    working_dir="/srv",
    stop_signal="SIGQUIT",
)


def created(world: World, says: ImageConfig = SAYS, annotation: str = "", **asked: object) -> Container:
    """A container of an image that says this."""
    world.outside.files.publish(OURS, b"a server's disk", config=says)
    world.pull(OURS)
    annotations = {"virtshim.io/image-config": annotation} if annotation else {}
    # As kubelet asks: by the id, with the pod's own text beside it.
    config = container_config(**{"image": world.outside.files.published[OURS].id.value, "user_image": OURS} | asked)
    sandbox = world.run(config=sandbox_config(annotations=annotations))
    return world.container(world.create(sandbox, config=config))


@pytest.mark.parametrize(
    ("command", "args", "runs"),
    [
        ((), (), ("/bin/server", "--foreground", "--port", "80")),
        ((), ("--debug",), ("/bin/server", "--foreground", "--debug")),
        (("/bin/sh",), (), ("/bin/sh",)),
        (("/bin/sh",), ("-c", "x"), ("/bin/sh", "-c", "x")),
    ],
)
def test_command_and_args_replace_entrypoint_and_cmd(
    world: World, command: tuple[str, ...], args: tuple[str, ...], runs: tuple[str, ...]
) -> None:
    assert created(world, command=command, args=args).spec.command == runs


@pytest.mark.parametrize(
    ("says", "runs"), [(ImageConfig(), ()), (ImageConfig(env=("PATH=/bin",)), ()), (ImageConfig(cmd=("sh",)), ("sh",))]
)
def test_an_image_without_entrypoint_and_cmd_is_a_plain_vm(
    world: World, says: ImageConfig, runs: tuple[str, ...]
) -> None:
    assert created(world, says).spec.command == runs


def test_environment_directory_user_and_stop_signal_come_from_the_image(world: World) -> None:
    container = created(world)
    for command in (entrypoint_command(container), in_container(container, ("env",))):
        envs = dict(command.envs)
        assert (envs["PATH"], envs["MODE"], envs["EMPTY"]) == (b"/opt/bin", b"from image", b"")
        assert (command.working_dir, command.user) == ("/srv", RunAs("app", 7))
        assert "HOME" not in envs
    assert container.spec.image_config.stop_signal == "SIGQUIT"


def test_the_pods_values_win_over_the_images(world: World) -> None:
    user = RunAs("1000", supplementary=(5,))
    container = created(world, envs=(("MODE", b"from pod"),), working_dir="/tmp", user=user)
    command = in_container(container, ("env",))
    envs = dict(command.envs)
    assert (envs["PATH"], envs["MODE"]) == (b"/opt/bin", b"from pod")
    assert (command.working_dir, command.user) == ("/tmp", user)


def test_the_images_user_keeps_the_pods_groups(world: World) -> None:
    container = created(world, user=RunAs(supplementary=(5,), own_groups=False))
    assert in_container(container, ("id",)).user == RunAs("app", 7, (5,), own_groups=False)


def test_an_annotation_turns_the_image_config_off(world: World) -> None:
    container = created(world, annotation="ignore")
    assert container.spec.command == ()
    assert container.spec.image_config == ImageConfig()
    command = in_container(container, ("env",))
    assert (command.user, command.working_dir) == (RunAs(), "")
    assert "MODE" not in dict(command.envs)


def test_with_commands_ignored_the_images_command_is_ignored_too(world: World) -> None:
    container = created(world, annotation="use")
    assert container.spec.command
    world.remove_sandbox(container.sandbox_id)
    sandbox = world.run(config=sandbox_config(annotations={"virtshim.io/command": "ignore"}))
    config = container_config(image=OURS, user_image=OURS)
    assert world.container(world.create(sandbox, config=config)).spec.command == ()


def test_the_image_config_is_fixed_when_the_container_is_created(world: World) -> None:
    container = created(world)
    world.outside.files.publish(OURS, b"a server's disk")
    world.pull(OURS)
    world.images.remove(OURS)
    again = world.recovered().container(container.id)
    assert again.spec.image_config == SAYS
