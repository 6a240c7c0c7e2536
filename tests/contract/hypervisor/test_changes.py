"""Every hypervisor can change existing VMs: size, limits, pause, reset, saved memory and unplugged devices."""

from __future__ import annotations

import threading
import uuid

import pytest
from contract.hypervisor.worlds import AN_HOUR, CARD, SERIAL_PORT, WAIT_LIMIT, A, World
from fakes.processes import hanging

from virtshim.model.cgroup import CgroupLimits
from virtshim.model.errors import DeadlineExceeded, NotFound, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import Power, PowerState, VmSize


def test_a_vm_gets_vcpus_up_to_its_maximum_whether_on_or_off(world: World) -> None:
    spec = world.spec(size=VmSize(vcpus=1, max_vcpus=3, memory_bytes=32 << 20))
    world.hypervisor.define(spec)
    world.resizing.add_vcpus(spec.uuid, 2)
    world.hypervisor.start(spec.uuid)
    world.resizing.add_vcpus(spec.uuid, 3)
    world.resizing.add_vcpus(spec.uuid, 1)  # none is taken away, and that is no error
    with pytest.raises(WrongState, match="3 vCPUs, not 4"):
        world.resizing.add_vcpus(spec.uuid, 4)


def test_a_vm_that_is_off_takes_memory_up_to_its_maximum(world: World) -> None:
    spec = world.spec(size=VmSize(vcpus=1, memory_bytes=32 << 20, max_memory_bytes=64 << 20))
    world.hypervisor.define(spec)
    world.resizing.set_memory(spec.uuid, 48 << 20, WAIT_LIMIT, threading.Event())
    world.resizing.set_memory(spec.uuid, 32 << 20, WAIT_LIMIT, threading.Event())
    with pytest.raises(WrongState, match="not 134217728"):
        world.resizing.set_memory(spec.uuid, 128 << 20, WAIT_LIMIT, threading.Event())
    assert world.resizing.memory_in_use(spec.uuid, threading.Event()) is None
    world.hypervisor.start(spec.uuid)
    world.resizing.set_memory(spec.uuid, 64 << 20, WAIT_LIMIT, threading.Event())


def test_foreign_and_unknown_vms_are_not_resized(world: World) -> None:
    foreign = world.spec().uuid
    world.add_foreign(foreign, "somebody-elses")
    for domain in (foreign, uuid.uuid4()):
        for change in (
            lambda domain=domain: world.resizing.add_vcpus(domain, 1),
            lambda domain=domain: world.resizing.set_memory(domain, 32 << 20, WAIT_LIMIT, threading.Event()),
            lambda domain=domain: world.resizing.memory_in_use(domain, threading.Event()),
        ):
            with pytest.raises(NotFound):
                change()


def test_limits_are_left_alone_where_libvirt_manages_no_cgroups(world: World) -> None:
    domain = world.running()
    world.resizing.set_limits(domain, CgroupLimits(cpu_quota=50_000, memory=1 << 30))
    assert world.hypervisor.power(domain).power is Power.RUNNING


# --- pause and reset


def test_a_paused_vm_stays_paused_until_it_is_resumed(world: World) -> None:
    domain = world.running()
    world.pausing.pause(domain)
    assert world.hypervisor.power(domain) == PowerState(Power.PAUSED)
    with pytest.raises(WrongState):
        world.pausing.pause(domain)
    assert not world.pausing.out_of_space(domain)
    for _ in range(2):
        world.pausing.resume(domain)
        assert world.hypervisor.power(domain) == PowerState(Power.RUNNING)


def test_only_running_vms_are_paused_and_resuming_others_does_nothing(world: World) -> None:
    spec = world.spec()
    world.hypervisor.define(spec)
    with pytest.raises(WrongState):
        world.pausing.pause(spec.uuid)
    with pytest.raises(NotFound):
        world.pausing.pause(uuid.uuid4())
    for domain in (spec.uuid, uuid.uuid4()):
        world.pausing.resume(domain)
        assert not world.pausing.out_of_space(domain)


def test_a_foreign_vm_is_not_paused(world: World) -> None:
    foreign = uuid.uuid4()
    world.add_foreign(foreign, "somebody-elses")
    with pytest.raises(NotFound):
        world.pausing.pause(foreign)
    assert world.foreign_runs(foreign)


def test_links_of_a_vm_are_set_while_it_is_on(world: World, request: pytest.FixtureRequest) -> None:
    if "test-driver" in request.node.name:
        return  # it has no links
    domain = world.running()
    world.pausing.set_links(domain, A, up=False)
    world.pausing.pause(domain)
    world.pausing.set_links(domain, A, up=True)
    with pytest.raises(NotFound):
        world.pausing.set_links(domain, ContainerId("f" * 64), up=False)
    world.hypervisor.destroy(domain, A)
    with pytest.raises(WrongState):
        world.pausing.set_links(domain, A, up=True)


def test_a_reset_vm_keeps_running_and_a_vm_that_is_off_is_not_reset(
    world: World, request: pytest.FixtureRequest
) -> None:
    if "test-driver" in request.node.name:
        return  # it has no reset button
    domain = world.running()
    with world.hypervisor.watching(domain) as news:
        world.control.reset(domain)
        assert news.wait(WAIT_LIMIT), "a reset is reported like any other restart"
    assert world.hypervisor.power(domain) == PowerState(Power.RUNNING)
    world.hypervisor.destroy(domain, A)
    with pytest.raises(WrongState):
        world.control.reset(domain)


def test_a_definition_is_shown_without_the_network_key(world: World) -> None:
    spec = world.spec(fetch_key="s3cret", tapmanager_socket="/run/tapmanager.sock")
    world.hypervisor.define(spec)
    shown = world.control.definition(spec.uuid)
    assert spec.name in shown
    assert "s3cret" not in shown


def test_a_guest_without_an_agent_is_no_news(world: World) -> None:
    told: list[uuid.UUID] = []
    world.control.on_agent(told.append)
    world.control.look_for_agent(world.running())
    assert told == []


def test_a_foreign_vm_is_neither_reset_nor_shown(world: World) -> None:
    foreign = uuid.uuid4()
    world.add_foreign(foreign, "somebody-elses")
    for call in (world.control.reset, world.control.definition, world.control.look_for_agent):
        with pytest.raises(NotFound):
            call(foreign)
    assert world.foreign_runs(foreign)


def test_saving_memory_leaves_a_paused_vm_paused(world: World, request: pytest.FixtureRequest) -> None:
    if "test-driver" in request.node.name:
        return  # it has no memory
    domain = world.running()
    world.pausing.pause(domain)
    path = world.directory / "memory.save"
    world.pausing.save_memory(domain, str(path), WAIT_LIMIT)
    assert world.hypervisor.power(domain) == PowerState(Power.PAUSED)
    if "qemu" in request.node.name:
        assert path.read_bytes().startswith(b"LibvirtQemudSave")
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(DeadlineExceeded):
            world.pausing.save_memory(domain, str(world.directory / "late.save"), 0.0)
        assert not (world.directory / "late.save").exists()
    world.pausing.resume(domain)
    assert world.hypervisor.power(domain) == PowerState(Power.RUNNING)


def test_unplug_does_nothing_for_a_vm_without_host_devices(world: World) -> None:
    spec = world.spec()
    world.hypervisor.define(spec)
    assert not world.unplugging.unplug(spec.uuid, A, WAIT_LIMIT)
    world.hypervisor.start(spec.uuid)
    assert not world.unplugging.unplug(spec.uuid, A, WAIT_LIMIT)
    assert not world.unplugging.unplug(uuid.uuid4(), A, WAIT_LIMIT)
    assert world.hypervisor.power(spec.uuid).power is Power.RUNNING


def test_a_device_that_the_guest_releases_is_detached(world: World, request: pytest.FixtureRequest) -> None:
    if "test-driver" in request.node.name:
        return  # it plugs nothing
    domain = world.running()
    for alias in ("ua-host-pci1", "ua-host-pci2"):
        world.plug_in(domain, SERIAL_PORT, alias)
    assert not world.unplugging.unplug(domain, ContainerId("b" * 64), WAIT_LIMIT), "another container's"
    assert not world.unplugging.unplug(domain, A, AN_HOUR), "the guest is not waited for any longer"
    assert world.hypervisor.power(domain).power is Power.RUNNING


def test_unplug_gives_up_at_its_time_limit_if_the_guest_keeps_the_device(
    world: World, request: pytest.FixtureRequest
) -> None:
    if "test-driver" in request.node.name:
        return
    spec = world.spec()
    domain = spec.uuid
    world.hypervisor.define(spec)
    world.add_root_port(domain)
    world.hypervisor.start(domain)
    world.plug_in(domain, CARD, "ua-host-pci1")
    for _ in range(2):  # asked again before it has answered
        assert list(world.unplugging.unplug(domain, A, 0.2)) == ["ua-host-pci1"]
    world.hypervisor.destroy(domain, A)
    assert not world.unplugging.unplug(domain, A, AN_HOUR)


def test_unplug_does_not_ask_a_paused_guest(world: World, request: pytest.FixtureRequest) -> None:
    if "test-driver" in request.node.name:
        return
    domain = world.running()
    world.plug_in(domain, SERIAL_PORT, "ua-host-pci1")
    world.pausing.pause(domain)
    assert list(world.unplugging.unplug(domain, A, AN_HOUR)) == ["ua-host-pci1"]
    world.pausing.resume(domain)
    assert not world.unplugging.unplug(domain, A, WAIT_LIMIT)


@pytest.mark.parametrize("ended", [False, pytest.param(True, marks=pytest.mark.full)])
def test_unplug_does_not_wait_for_a_hung_vm(world: World, request: pytest.FixtureRequest, *, ended: bool) -> None:
    """`ended`: the VM is destroyed meanwhile, which takes libvirt ten seconds."""
    if "qemu" not in request.node.name:
        return  # only a real process can be stopped
    spec = world.spec()
    domain = world.running()
    world.plug_in(domain, SERIAL_PORT, "ua-host-pci1")
    process = world.usage_of(spec)[domain].process
    assert process is not None
    with hanging(process.pid):
        assert list(world.unplugging.unplug(domain, A, 0.5)) == ["ua-host-pci1"]
        if ended:
            world.hypervisor.destroy(domain, A)
    assert world.hypervisor.power(domain).is_on != ended
