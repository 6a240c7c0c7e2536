"""A unique prefix finds a record, and filters narrow lists."""

import dataclasses

import pytest
from fakes.world import World, container_config, pod_key, sandbox_config

from virtshim.model.container import Container, ContainerName, ContainerPhase, ContainerSpec, ContainerStatus
from virtshim.model.errors import InvalidRequest, NotFound
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.model.sandbox import Sandbox, SandboxPhase
from virtshim.pods.lookup import (
    Filter,
    find_container,
    find_sandbox,
    get_container,
    get_sandbox,
    list_containers,
    list_sandboxes,
)


def sandbox(world: World, prefix: str, phase: SandboxPhase = SandboxPhase.READY, **labels: str) -> Sandbox:
    record = Sandbox(SandboxId(prefix.ljust(64, "0")), pod_key(prefix), sandbox_config(labels=labels), 1, phase)
    world.records.sandboxes.add(record)
    return record


def container(world: World, prefix: str, pod: str = "a", phase: ContainerPhase = ContainerPhase.CREATED) -> Container:
    record = Container(
        ContainerSpec(
            id=ContainerId(prefix.ljust(64, "0")),
            sandbox_id=SandboxId(pod.ljust(64, "0")),
            name=ContainerName(prefix, 0),
            config=container_config(labels={"name": prefix}),
            image=ImageDigest(f"sha256:{'1' * 64}"),
            image_ref="ref",
            domain_uuid="12345678-9abc-4def-8123-456789abcdef",
            created_at=1,
        ),
        ContainerStatus(
            phase=phase,
        ),
    )
    world.records.containers.add(record)
    return record


def test_a_full_id_and_a_unique_prefix_find_the_record(world: World) -> None:
    one = sandbox(world, "ab1")
    sandbox(world, "ab2")
    assert find_sandbox(world.records, one.id.value) == one
    assert find_sandbox(world.records, "ab1") == one
    made = container(world, "cd")
    assert get_container(world.records, "c") == made


def test_an_ambiguous_prefix_is_an_error_that_says_so(world: World) -> None:
    sandbox(world, "ab1")
    sandbox(world, "ab2")
    with pytest.raises(InvalidRequest, match="2 match; give more digits"):
        find_sandbox(world.records, "ab")


def test_an_unknown_id_is_none_or_not_found(world: World) -> None:
    assert find_sandbox(world.records, "ff") is None
    assert find_container(world.records, "ff") is None
    with pytest.raises(NotFound, match="no such pod sandbox: 'ff'"):
        get_sandbox(world.records, "ff")
    with pytest.raises(NotFound, match="no such container: 'ff'"):
        get_container(world.records, "ff")


def test_an_empty_id_is_an_error_and_never_everything(world: World) -> None:
    sandbox(world, "ab1")
    with pytest.raises(InvalidRequest, match="empty"):
        find_sandbox(world.records, "")


def test_a_very_long_id_is_cut_in_the_message(world: World) -> None:
    with pytest.raises(NotFound) as missing:
        get_container(world.records, "x" * 100_000)
    assert len(str(missing.value)) < 200


def test_half_made_things_are_neither_found_nor_listed(world: World) -> None:
    sandbox(world, "ab", SandboxPhase.CREATING)
    container(world, "cd", phase=ContainerPhase.CREATING)
    assert find_sandbox(world.records, "ab") is None
    assert find_container(world.records, "cd") is None
    assert list_sandboxes(world.records, Filter()) == []
    assert list_containers(world.records, Filter()) == []


@pytest.mark.parametrize("phase", [SandboxPhase.NOT_READY, SandboxPhase.REMOVING])
def test_sandboxes_that_are_not_ready_or_half_removed_are_listed(world: World, phase: SandboxPhase) -> None:
    made = sandbox(world, "ab", phase)
    assert list_sandboxes(world.records, Filter()) == [made]


def test_a_list_is_a_snapshot_that_later_calls_do_not_change(world: World) -> None:
    one = sandbox(world, "ab")
    before = world.records.sandboxes.all()
    world.records.sandboxes.replace(dataclasses.replace(one, reason="changed"))
    world.records.sandboxes.delete(one.id)
    assert before == [one]
