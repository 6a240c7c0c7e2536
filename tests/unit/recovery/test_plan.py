"""The plan of a start is a pure table from records and what exists to actions."""

import dataclasses
import itertools
import uuid
from dataclasses import fields

import pytest
from fakes.world import container_config, pod_key, sandbox_config

from virtshim.model.container import (
    Container,
    ContainerName,
    ContainerPhase,
    ContainerSpec,
    ContainerStatus,
    Exit,
    ExitReason,
    Resources,
)
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.model.sandbox import Sandbox, SandboxPhase
from virtshim.model.vm import OffReason, OwnedDomain, Power, PowerState
from virtshim.recovery.plan import NodeState, Plan, plan

POD, CONTAINER = SandboxId("a" * 64), ContainerId("c" * 64)
ON, OFF = PowerState(Power.RUNNING), PowerState(Power.OFF, OffReason.SHUTDOWN)


def sandbox(phase: SandboxPhase = SandboxPhase.READY) -> Sandbox:
    return Sandbox(POD, pod_key(), sandbox_config(), 1, phase)


def container(phase: ContainerPhase) -> Container:
    return Container(
        ContainerSpec(
            id=CONTAINER,
            sandbox_id=POD,
            name=ContainerName("vm", 0),
            config=container_config(),
            image=ImageDigest(f"sha256:{'1' * 64}"),
            image_ref="ref",
            domain_uuid=str(CONTAINER.domain_uuid()),
            created_at=1,
        ),
        ContainerStatus(
            phase=phase,
            exit=Exit(0, ExitReason.COMPLETED, 1) if phase is ContainerPhase.EXITED else None,
        ),
    )


def domain(state: PowerState = ON, owner: ContainerId = CONTAINER) -> OwnedDomain:
    return OwnedDomain(uuid.uuid4(), "virtshim-x", owner, POD, state)


def planned(
    *,
    sandboxes: tuple[Sandbox, ...] = (),
    containers: tuple[Container, ...] = (),
    domains: tuple[OwnedDomain, ...] = (),
    networks: frozenset[SandboxId] = frozenset(),
    directories: frozenset[ContainerId] = frozenset(),
    pods_with_disks: frozenset[str] = frozenset(),
    rebooted: bool = False,
) -> dict[str, tuple[object, ...]]:
    """The actions that are not empty."""
    made = plan(NodeState(sandboxes, containers, domains, networks, directories, pods_with_disks, rebooted))
    return {field.name: getattr(made, field.name) for field in fields(Plan) if getattr(made, field.name)}


def test_an_empty_node_needs_no_action() -> None:
    assert planned() == {}
    assert planned(rebooted=True) == {}


def test_an_unfinished_resize_is_completed_while_the_vm_exists() -> None:
    for phase, state, expected in (
        (ContainerPhase.RUNNING, ON, {"follow", "resizes"}),
        (ContainerPhase.RUNNING, OFF, {"settle"}),
        (ContainerPhase.CREATED, OFF, {"resizes"}),
        (ContainerPhase.CREATED, None, set()),
        (ContainerPhase.EXITED, OFF, set()),
    ):
        made = container(phase)
        half = Container(made.spec, dataclasses.replace(made.status, resizing=Resources(cpu_quota=1)))
        found = planned(
            sandboxes=(sandbox(),), containers=(half,), domains=(domain(state),) if state else (),
            networks=frozenset({POD}), directories=frozenset({CONTAINER}),
        )  # fmt: skip
        assert found.keys() == expected


@pytest.mark.parametrize("phase", [SandboxPhase.CREATING, SandboxPhase.REMOVING])
@pytest.mark.parametrize("network", [False, True])
def test_a_half_made_or_half_removed_sandbox_is_undone(phase: SandboxPhase, network: bool) -> None:
    half = sandbox(phase)
    found = planned(sandboxes=(half,), networks=frozenset({POD} if network else ()))
    assert found == {"undo_sandboxes": (half,)}


def test_a_ready_sandbox_with_its_network_is_left_alone() -> None:
    assert planned(sandboxes=(sandbox(),), networks=frozenset({POD})) == {}


def test_a_ready_sandbox_without_its_network_becomes_not_ready() -> None:
    assert planned(sandboxes=(sandbox(),)) == {"lost_networks": (sandbox(),)}


def test_after_a_reboot_every_network_is_lost_even_if_parts_exist() -> None:
    assert planned(sandboxes=(sandbox(),), networks=frozenset({POD}), rebooted=True) == {"lost_networks": (sandbox(),)}


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("rebooted", [False, True])
def test_a_sandbox_that_is_not_ready_waits_for_kubelet(network: bool, rebooted: bool) -> None:
    stopped = sandbox(SandboxPhase.NOT_READY)
    assert planned(sandboxes=(stopped,), networks=frozenset({POD} if network else ()), rebooted=rebooted) == {}


RUNNING, CREATED, EXITED = ContainerPhase.RUNNING, ContainerPhase.CREATED, ContainerPhase.EXITED

TABLE = [
    # phase, domain, action
    (ContainerPhase.CREATING, None, "undo_containers"),
    (ContainerPhase.CREATING, OFF, "undo_containers"),
    (ContainerPhase.REMOVING, None, "undo_containers"),
    (ContainerPhase.REMOVING, ON, "undo_containers"),
    (CREATED, None, None),
    (CREATED, OFF, None),
    (CREATED, ON, "adopt"),
    (RUNNING, ON, "follow"),
    (RUNNING, PowerState(Power.PAUSED), "follow"),
    (RUNNING, PowerState(Power.SHUTTING_DOWN), "follow"),
    (RUNNING, OFF, "settle"),
    (RUNNING, PowerState(Power.CRASHED), "settle"),
    (RUNNING, None, "settle"),
    (EXITED, None, None),
    (EXITED, OFF, None),
]


@pytest.mark.parametrize(("phase", "state", "action"), TABLE)
def test_phase_and_power_decide_what_happens_to_a_container(
    phase: ContainerPhase, state: PowerState | None, action: str | None
) -> None:
    found = planned(
        sandboxes=(sandbox(),),
        containers=(container(phase),),
        domains=(domain(state),) if state else (),
        networks=frozenset({POD}),
        directories=frozenset({CONTAINER}),
    )
    assert found == ({action: (container(phase),)} if action else {})


@pytest.mark.parametrize("phase", [CREATED, RUNNING, EXITED])
@pytest.mark.parametrize("state", [ON, OFF])
def test_a_container_without_its_sandbox_is_only_removed(phase: ContainerPhase, state: PowerState) -> None:
    found = planned(containers=(container(phase),), domains=(domain(state),), directories=frozenset({CONTAINER}))
    assert found == {"undo_containers": (container(phase),)}


@pytest.mark.parametrize("state", [ON, OFF])
def test_a_domain_of_ours_without_a_record_is_stray(state: PowerState) -> None:
    stray = domain(state)
    assert planned(domains=(stray,)) == {"stray_domains": (stray,)}


def test_the_vm_of_an_exited_container_is_ended_if_it_runs() -> None:
    on = domain(ON)
    found = planned(sandboxes=(sandbox(),), containers=(container(EXITED),), domains=(on,), networks=frozenset({POD}))
    assert found == {"unwanted_domains": (on,)}


def test_networks_and_directories_without_a_record_are_stray() -> None:
    found = planned(networks=frozenset({POD}), directories=frozenset({CONTAINER}))
    assert found == {"stray_networks": (POD,), "stray_directories": (CONTAINER,)}


def test_nothing_that_a_record_names_is_stray() -> None:
    for phase, pod_phase in itertools.product(ContainerPhase, SandboxPhase):
        found = planned(
            sandboxes=(sandbox(pod_phase),),
            containers=(container(phase),),
            domains=(domain(),),
            networks=frozenset({POD}),
            directories=frozenset({CONTAINER}),
        )
        assert not any(action.startswith("stray") for action in found), (phase, pod_phase)


def test_each_container_gets_at_most_one_action() -> None:
    for phase, state, known in itertools.product(ContainerPhase, (None, ON, OFF), (False, True)):
        found = planned(
            sandboxes=(sandbox(),) if known else (),
            containers=(container(phase),),
            domains=(domain(state),) if state else (),
        )
        actions = [action for action, items in found.items() if container(phase) in items]
        assert len(actions) <= 1, (phase, state, known, actions)


@pytest.mark.parametrize("domains", [(), (domain(OFF),), (domain(ON),)])
def test_a_vm_that_gets_a_new_qemu_is_finished_and_followed_whether_it_is_on_or_not(
    domains: tuple[OwnedDomain, ...],
) -> None:
    renewed = container(ContainerPhase.RUNNING).with_saving(saving=True, renewing=True)
    found = planned(sandboxes=(sandbox(),), containers=(renewed,), domains=domains, networks=frozenset({POD}))
    assert found == {"states": (renewed,), "follow": (renewed,)}
