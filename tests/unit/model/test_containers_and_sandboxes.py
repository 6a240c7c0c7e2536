"""Records change their phase only as the table allows, and describe themselves."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from fakes.changed import changed

from virtshim.model.container import (
    Container,
    ContainerConfig,
    ContainerName,
    ContainerPhase,
    ContainerSpec,
    Exit,
    ExitReason,
)
from virtshim.model.errors import WrongState
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.model.network import Dns, PodNetwork
from virtshim.model.sandbox import PodKey, Sandbox, SandboxConfig, SandboxPhase
from virtshim.model.vm import OffReason, Power, PowerState

ENDED = Exit(0, ExitReason.COMPLETED, 9)
NETWORK = PodNetwork("/run/netns/x", (), ("10.0.0.2",), Dns(), "secret")

CONTAINER = Container(
    ContainerSpec(
        id=ContainerId("c" * 64),
        sandbox_id=SandboxId("a" * 64),
        name=ContainerName("vm", 0),
        config=ContainerConfig("img"),
        image=ImageDigest(f"sha256:{'1' * 64}"),
        image_ref="ref",
        domain_uuid="u",
        created_at=1,
    ),
)
SANDBOX = Sandbox(SandboxId("a" * 64), PodKey("default", "web", "uid", 0), SandboxConfig(), 1)

CONTAINER_MOVES: dict[ContainerPhase, Callable[[Container], Container]] = {
    ContainerPhase.CREATED: Container.created,
    ContainerPhase.RUNNING: lambda container: container.running(5),
    ContainerPhase.EXITED: lambda container: container.exited(ENDED),
    ContainerPhase.REMOVING: Container.removing,
}
CREATING, CREATED, RUNNING, EXITED, REMOVING, UNKNOWN = ContainerPhase
CONTAINER_TABLE = {
    CREATING: {CREATED, REMOVING},
    CREATED: {RUNNING, EXITED, REMOVING},
    RUNNING: {EXITED, REMOVING},
    EXITED: {REMOVING},
    REMOVING: {REMOVING},
    UNKNOWN: {REMOVING},
}

SANDBOX_MOVES: dict[SandboxPhase, Callable[[Sandbox], Sandbox]] = {
    SandboxPhase.READY: lambda sandbox: sandbox.ready(NETWORK),
    SandboxPhase.NOT_READY: lambda sandbox: sandbox.not_ready("why"),
    SandboxPhase.REMOVING: Sandbox.removing,
}
SANDBOX_TABLE = {
    SandboxPhase.CREATING: {SandboxPhase.READY, SandboxPhase.NOT_READY, SandboxPhase.REMOVING},
    SandboxPhase.READY: {SandboxPhase.NOT_READY, SandboxPhase.REMOVING},
    SandboxPhase.NOT_READY: {SandboxPhase.NOT_READY, SandboxPhase.REMOVING},
    SandboxPhase.REMOVING: {SandboxPhase.REMOVING},
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(ContainerPhase, CONTAINER_MOVES)))
def test_a_container_changes_phase_only_as_in_the_table(before: ContainerPhase, after: ContainerPhase) -> None:
    container = changed(CONTAINER, phase=before)
    if after in CONTAINER_TABLE[before]:
        assert CONTAINER_MOVES[after](container).phase is after
    else:
        with pytest.raises(WrongState, match=f"is {before.value}: it cannot become {after.value}"):
            CONTAINER_MOVES[after](container)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SandboxPhase, SANDBOX_MOVES)))
def test_a_sandbox_changes_phase_only_as_in_the_table(before: SandboxPhase, after: SandboxPhase) -> None:
    sandbox = dataclasses.replace(SANDBOX, phase=before)
    if after in SANDBOX_TABLE[before]:
        assert SANDBOX_MOVES[after](sandbox).phase is after
    else:
        with pytest.raises(WrongState):
            SANDBOX_MOVES[after](sandbox)


def test_only_half_made_things_are_hidden() -> None:
    for phase in ContainerPhase:
        assert changed(CONTAINER, phase=phase).is_visible == (phase is not CREATING)
    for pod_phase in SandboxPhase:
        shown = dataclasses.replace(SANDBOX, phase=pod_phase)
        assert shown.is_visible == (pod_phase is not SandboxPhase.CREATING)
        assert shown.is_ready == (pod_phase is SandboxPhase.READY)


def test_a_running_container_knows_when_it_was_started_and_an_exited_one_how_it_ended() -> None:
    running = CONTAINER.created().running(5)
    assert running.status.started_at == 5
    assert running.exited(ENDED).exit == ENDED


def test_a_vm_may_be_on_while_it_runs_while_it_is_removed_and_after_a_failed_start() -> None:
    failed = Exit(128, ExitReason.START_ERROR, 9)
    created = CONTAINER.created()
    assert [c.may_be_running for c in (CONTAINER, created, created.exited(ENDED))] == [False] * 3
    assert [c.may_be_running for c in (created.running(5), created.removing(), created.exited(failed))] == [True] * 3


def test_a_container_has_its_devices_until_they_are_released() -> None:
    failed = Exit(128, ExitReason.START_ERROR, 9)
    created = changed(CONTAINER, claims=("pci:0000:3b:00.1",)).created()
    ended = created.running(5).exited(ENDED)
    there = (created.running(5), created.removing(), created.exited(failed), ended)
    assert [c.claims for c in there] == [created.claims] * 4
    assert ended.with_claims(()).claims == ()


def test_only_an_ended_vm_owes_devices() -> None:
    failed = Exit(128, ExitReason.START_ERROR, 9)
    created = changed(CONTAINER, claims=("pci:0000:3b:00.1",)).created()
    ended = created.running(5).exited(ENDED)
    assert ended.owes_devices
    others = (created, created.running(5), created.exited(failed), ended.removing(), ended.with_claims(()))
    assert not any(container.owes_devices for container in others)


def test_the_first_reason_of_a_sandbox_is_kept() -> None:
    assert SANDBOX.not_ready("its network is gone").not_ready("stopped").reason == "its network is gone"


def test_pods_and_containers_have_readable_names() -> None:
    assert str(SANDBOX.key) == "default/web (uid uid, attempt 0)"
    assert str(ContainerName("vm", 2)) == "vm (attempt 2)"


def test_the_key_of_a_network_is_not_shown() -> None:
    assert "secret" not in repr(NETWORK) + repr(SANDBOX.ready(NETWORK))


@pytest.mark.parametrize(
    ("power", "on"),
    [
        (Power.RUNNING, True),
        (Power.PAUSED, True),
        (Power.SHUTTING_DOWN, True),
        (Power.OFF, False),
        (Power.CRASHED, True),
        (Power.ABSENT, False),
    ],
)
def test_a_vm_is_on_while_qemu_exists(power: Power, on: bool) -> None:
    assert PowerState(power, OffReason.UNKNOWN).is_on == on
