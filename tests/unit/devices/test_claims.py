"""A device of the host belongs to one container at a time, from its grant until it is free again."""

import dataclasses

import pytest
from fakes.background import Background
from fakes.world import World, container_config, sandbox_config

from virtshim.devices.values import CriDevice
from virtshim.guest.command import in_container
from virtshim.model.container import ContainerConfig, ContainerPhase, ExitReason, Resources
from virtshim.model.deadline import Deadline
from virtshim.model.errors import InternalError, InvalidRequest, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.network import Interface
from virtshim.model.vm import OffReason, Power
from virtshim.seed.network_config import network_config

NODE, ADDRESS = "/dev/vfio/7", "0000:3b:00.1"
CLAIM = f"pci:{ADDRESS}"
GIB = 1 << 30


@pytest.fixture
def world(world: World) -> World:
    world.outside.devices.add_function(NODE, ADDRESS)
    return world


def with_device(node: str = NODE, **changes: object) -> ContainerConfig:
    return container_config(devices=(CriDevice(node, node),), **changes)


def make(world: World, pod: str = "web", attempt: int = 0, sandbox: SandboxId | None = None) -> ContainerId:
    return world.create(sandbox or world.run(pod), attempt=attempt, config=with_device())


def holders(world: World) -> list[ContainerId]:
    return [c.id for c in world.records.containers.all() if CLAIM in c.claims]


def test_the_vm_gets_the_device_behind_the_node(world: World) -> None:
    container = make(world)
    (function,) = world.outside.vms.spec(world.domain(container)).granted.passthrough
    assert function.claim == CLAIM
    assert holders(world) == [container]


def test_a_cdi_name_and_the_environment_reach_the_resolver(world: World) -> None:
    world.outside.devices.nodes["vendor.com/nic=vf0"] = world.outside.devices.nodes[NODE]
    config = container_config(cdi=("vendor.com/nic=vf0",), envs=(("PCIDEVICE_X", ADDRESS.encode()), ("B", b"\xff")))
    container = world.create(world.run(), config=config)
    assert holders(world) == [container]


def test_commands_in_the_guest_know_the_guests_address(world: World) -> None:
    config = with_device(envs=(("PCIDEVICE_X", ADDRESS.encode()), ("OTHER", b"x")))
    container = world.create(world.run(), config=config)
    envs = dict(in_container(world.container(container), ("env",)).envs)
    assert (envs["PCIDEVICE_X"], envs["OTHER"]) == (b"0000:01:00.0", b"x")
    assert dict(world.container(container).config.envs)["PCIDEVICE_X"] == ADDRESS.encode()


def test_a_forged_variable_gives_an_error_and_no_device(world: World) -> None:
    sandbox = world.run()
    with pytest.raises(InvalidRequest, match="PCIDEVICE_X"):
        world.create(sandbox, config=container_config(envs=(("PCIDEVICE_X", ADDRESS.encode()),)))
    assert world.records.containers.all() == []
    assert world.outside.vms.owned() == []
    assert world.create(sandbox, config=with_device())


@pytest.mark.parametrize("values", [(ADDRESS, ""), ("", ADDRESS)])
def test_both_values_of_a_duplicate_variable_count(world: World, values: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="PCIDEVICE_X"):
        world.create(world.run(), config=container_config(envs=tuple(("PCIDEVICE_X", v.encode()) for v in values)))


def test_an_unfit_device_is_not_claimed(world: World) -> None:
    world.outside.devices.unfit.add(CLAIM)
    with pytest.raises(WrongState, match="vfio-pci"):
        make(world)
    assert world.records.containers.all() == []


def test_a_device_that_disappears_before_the_start_fails_the_container_and_is_released(world: World) -> None:
    container = make(world)
    world.outside.devices.unfit.add(CLAIM)
    with pytest.raises(WrongState, match="vfio-pci"):
        world.start(container)
    failed = world.container(container)
    assert failed.exit is not None
    assert (failed.phase, failed.exit.reason) == (ContainerPhase.EXITED, ExitReason.START_ERROR)
    assert holders(world) == []


def test_a_device_of_another_pod_is_refused_with_its_name(world: World) -> None:
    first = make(world, "db")
    with pytest.raises(WrongState, match=f"{CLAIM} is held by container vm .{first}.* of pod default/db"):
        make(world, "web")
    assert [c.id for c in world.records.containers.all()] == [first]


def test_one_of_two_simultaneous_pods_gets_the_device_and_the_others_error_names_the_pod(world: World) -> None:
    sandboxes = [world.run("db"), world.run("web")]
    gate = world.journal.hold("records.containers.add")
    first = Background(lambda: make(world, sandbox=sandboxes[0]))
    gate.wait()
    second = Background(lambda: make(world, sandbox=sandboxes[1]))
    gate.open()
    first.done()
    with pytest.raises(WrongState, match="of pod default/db"):
        second.done()
    assert len(holders(world)) == 1


def test_a_failed_create_releases_the_device(world: World) -> None:
    sandbox = world.run()
    world.journal.fail("vms.define", InternalError("no"))
    with pytest.raises(InternalError):
        world.create(sandbox, config=with_device())
    assert holders(world) == []
    make(world, "other")


@pytest.mark.parametrize("ending", ["exit", "stop", "remove"])
def test_an_ended_vms_device_is_free_for_another_pod(world: World, ending: str) -> None:
    container = make(world, "job")
    world.start(container)
    if ending == "exit":
        world.outside.vms.end(world.domain(container), OffReason.SHUTDOWN)
        world.outside.vms.deliver()
    elif ending == "stop":
        world.stop(container)
    else:
        world.remove(container)
    other = make(world, "web")
    assert holders(world) == [other]
    world.start(other)


def test_a_running_vms_device_is_not_free(world: World) -> None:
    container = make(world, "job")
    world.start(container)
    with pytest.raises(WrongState, match="running"):
        make(world, "web")


def test_a_restart_takes_the_device_from_the_ended_attempt(world: World) -> None:
    sandbox = world.run()
    first = make(world, sandbox=sandbox)
    world.start(first)
    world.stop(first)
    second = make(world, sandbox=sandbox, attempt=1)
    world.start(second)
    assert holders(world) == [second]
    assert world.container(first).phase is ContainerPhase.EXITED
    world.remove(first)
    assert holders(world) == [second]


def test_a_start_that_failed_and_could_not_be_undone_does_not_block_the_next_attempt(world: World) -> None:
    sandbox = world.run()
    first = make(world, sandbox=sandbox)
    world.journal.fail("records.containers.replace", InternalError("no"))
    world.journal.fail("vms.destroy", InternalError("no"))
    with pytest.raises(InternalError):
        world.start(first)
    assert holders(world) == [first], "its VM may be on"
    with pytest.raises(WrongState):
        make(world, "other")
    second = make(world, sandbox=sandbox, attempt=1)
    assert world.outside.vms.power(world.domain(first)).power is Power.OFF
    assert holders(world) == [second]


def test_a_start_that_failed_and_was_undone_frees_the_device(world: World) -> None:
    first = make(world)
    world.journal.fail("vms.start", InternalError("no"))
    with pytest.raises(InternalError):
        world.start(first)
    assert holders(world) == []


def test_the_device_of_an_attempt_that_never_started_goes_to_the_next_attempt(world: World) -> None:
    sandbox = world.run()
    first = make(world, sandbox=sandbox)
    second = make(world, sandbox=sandbox, attempt=1)
    assert holders(world) == [second]
    with pytest.raises(WrongState, match="remove it"):
        world.start(first)
    world.start(second)


def test_a_stopped_sandbox_holds_nothing(world: World) -> None:
    sandbox = world.run()
    make(world, sandbox=sandbox)
    world.stop_sandbox(sandbox)
    other = make(world, "other")
    assert holders(world) == [other]


def test_claims_are_still_held_after_a_restart_of_virtshim(world: World) -> None:
    container = make(world, "db")
    world.start(container)
    again = world.recovered()
    with pytest.raises(WrongState, match="default/db"):
        make(again, "web")
    again.close()


def test_claims_are_released_after_a_reboot_of_the_node(world: World) -> None:
    container = make(world, "db")
    world.start(container)
    again = world.recovered(rebooted=True)
    make(again, "web")
    again.close()


# --- what a VM with devices cannot do


def test_the_memory_of_a_vm_with_a_device_cannot_be_resized(world: World) -> None:
    container = world.create(world.run(), config=with_device(resources=Resources(memory_limit_bytes=2 * GIB)))
    world.start(container)
    with pytest.raises(WrongState, match="cannot change while it runs"):
        world.do.update_container_resources.resize(world.container(container), Resources(memory_limit_bytes=GIB))
    assert world.container(container).status.size.max_memory_bytes == 2 * GIB


def test_a_pod_with_a_device_that_asks_for_room_to_grow_is_refused(world: World) -> None:
    sandbox = world.run(config=sandbox_config(annotations={"virtshim.io/max-memory": "4Gi"}))
    with pytest.raises(InvalidRequest, match="host devices cannot grow"):
        make(world, sandbox=sandbox)


def test_a_vm_with_a_device_cannot_be_checkpointed(world: World) -> None:
    container = make(world)
    world.start(container)
    deadline = Deadline.after(world.outside.clock.monotonic(), 60)
    with pytest.raises(WrongState, match=CLAIM):
        world.do.checkpoint_container.checkpoint(world.container(container), "/c.tar", deadline)
    assert world.outside.vms.power(world.domain(container)).power is Power.RUNNING


# --- NICs that are functions of the host's cards


def pod_with_function(world: World, pod: str = "web", *, taken: bool = True) -> SandboxId:
    """tapmanager found a function in the pod's network, and gave it to VFIO; or, not `taken`, it was there before."""
    sandbox = world.sandbox(world.run(pod))
    assert sandbox.network is not None
    nic = Interface("net1", "0a:58:0a:01:00:07", 1500, ("10.1.0.7/24",), (), ADDRESS, taken)
    network = dataclasses.replace(sandbox.network, interfaces=(*sandbox.network.interfaces, nic))
    world.records.sandboxes.replace(dataclasses.replace(sandbox, network=network))
    return sandbox.id


def test_a_function_of_the_pods_network_goes_into_the_vm_and_is_claimed(world: World) -> None:
    container = world.create(pod_with_function(world))
    (function,) = world.outside.vms.spec(world.domain(container)).granted.passthrough
    assert function.claim == CLAIM
    assert holders(world) == [container]
    with pytest.raises(WrongState, match=CLAIM):
        make(world, "other")


def test_a_network_function_that_kubelet_also_granted_is_claimed_once(world: World) -> None:
    container = make(world, sandbox=pod_with_function(world))
    assert world.container(container).claims == (CLAIM,)


def test_the_guest_matches_its_address_to_the_functions_mac(world: World) -> None:
    world.create(pod_with_function(world))
    (request,) = world.outside.seeds.requests.values()
    config = network_config(request.interfaces, request.dns)
    assert config is not None
    (link,) = [link for link in config["config"] if link["name"] == "net1"]
    assert link["mac_address"] == "0a:58:0a:01:00:07"
    assert [subnet["address"] for subnet in link["subnets"]] == ["10.1.0.7/24"]


def test_a_function_that_only_a_network_configuration_names_is_not_claimed(world: World) -> None:
    container = world.create(pod_with_function(world, taken=False))
    assert world.container(container).claims == ()
    (request,) = world.outside.seeds.requests.values()
    assert [nic.name for nic in request.interfaces] == ["eth0"]


def test_a_function_that_kubelet_granted_has_its_networks_address(world: World) -> None:
    container = make(world, sandbox=pod_with_function(world, taken=False))
    assert world.container(container).claims == (CLAIM,)
    (request,) = world.outside.seeds.requests.values()
    assert [nic.name for nic in request.interfaces] == ["eth0", "net1"]
