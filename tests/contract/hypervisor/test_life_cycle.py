"""Every hypervisor defines, starts and ends VMs, and leaves the VMs of others alone."""

from __future__ import annotations

import re
import threading
import uuid

import pytest
from contract.hypervisor.worlds import WAIT_LIMIT, A, World

from virtshim.model.errors import AlreadyExists, InvalidRequest, NotFound, WrongState
from virtshim.model.hardware import Cache, Clock, DiskIo, HardwareOptions, Topology, Video
from virtshim.model.image import DiskFormat
from virtshim.model.sandbox import vm_disk_name, vm_uuid
from virtshim.model.vm import Disk, DiskBus, NumaCell, OffReason, Power, PowerState, VmSize
from virtshim.vm.driver import LibvirtHypervisor


def test_a_defined_vm_is_off_and_owned_by_this_node(world: World) -> None:
    spec = world.spec()
    world.hypervisor.define(spec)
    assert world.hypervisor.power(spec.uuid) == PowerState(Power.OFF)
    (owned,) = world.hypervisor.owned()
    assert (owned.uuid, owned.name) == (spec.uuid, spec.name)
    assert (owned.container_id, owned.sandbox_id) == (spec.container_id, spec.sandbox_id)
    assert owned.state.power is Power.OFF


def test_an_unknown_vm_is_absent_and_may_be_destroyed(world: World) -> None:
    unknown = uuid.uuid4()
    assert world.hypervisor.power(unknown).power is Power.ABSENT
    world.hypervisor.ask_to_shut_down(unknown)
    world.hypervisor.destroy(unknown, A)
    world.hypervisor.undefine(unknown, A)
    with pytest.raises(NotFound):
        world.hypervisor.start(unknown)


def test_defining_a_vm_again_replaces_its_definition(world: World) -> None:
    world.hypervisor.define(world.spec())
    world.hypervisor.define(world.spec(size=VmSize(vcpus=2, memory_bytes=32 << 20)))
    world.hypervisor.define(world.spec(name="virtshim-contract-renamed"))
    assert [domain.name for domain in world.hypervisor.owned()] == ["virtshim-contract-renamed"]


def test_a_started_vm_runs_and_a_second_start_is_refused(world: World) -> None:
    domain = world.running()
    assert world.hypervisor.power(domain) == PowerState(Power.RUNNING)
    assert world.hypervisor.owned()[0].state.power is Power.RUNNING
    with pytest.raises(WrongState):
        world.hypervisor.start(domain)


def test_destroy_reports_its_reason_and_may_be_called_twice(world: World) -> None:
    domain = world.running()
    world.hypervisor.destroy(domain, A)
    assert world.hypervisor.power(domain) == PowerState(Power.OFF, OffReason.DESTROYED)
    world.hypervisor.destroy(domain, A)
    world.hypervisor.ask_to_shut_down(domain)
    assert world.hypervisor.power(domain) == PowerState(Power.OFF, OffReason.DESTROYED)


def test_the_next_vm_starts_on_a_disk_as_soon_as_the_last_one_is_destroyed(world: World) -> None:
    for digit in "abab":
        spec = world.spec(digit)
        world.hypervisor.define(spec)
        world.hypervisor.start(spec.uuid)
        world.hypervisor.destroy(spec.uuid, spec.container_id)
    assert {domain.state.power for domain in world.hypervisor.owned()} == {Power.OFF}


def test_a_vm_that_outlives_its_pods_starts_again_on_its_disk_as_soon_as_it_is_destroyed(world: World) -> None:
    name = vm_disk_name("default", "db", "vm")
    disk = world.directory / f"{name}.raw"
    disk.parent.mkdir(parents=True)
    disk.write_bytes(bytes(1 << 20))
    for digit in "abab":
        spec = world.spec(
            digit, uuid=vm_uuid(name), name="virtshim-lasting", disks=(Disk(str(disk), DiskFormat.RAW, "root"),)
        )
        world.hypervisor.define(spec)
        world.hypervisor.start(spec.uuid)
        assert world.hypervisor.power(spec.uuid).power is Power.RUNNING
        world.hypervisor.destroy(spec.uuid, spec.container_id)
        assert not world.hypervisor.power(spec.uuid).is_on


def test_a_vm_with_numa_nodes_runs_and_grows(world: World) -> None:
    cells = tuple(NumaCell(0, frozenset({0}), (vcpu, vcpu + 2), 32 << 20) for vcpu in range(2))
    size = VmSize(vcpus=2, max_vcpus=4, memory_bytes=32 << 20, max_memory_bytes=64 << 20)
    spec = world.spec(size=size, cells=cells)
    world.hypervisor.define(spec)
    world.hypervisor.start(spec.uuid)
    world.resizing.add_vcpus(spec.uuid, 4)
    world.resizing.set_memory(spec.uuid, 64 << 20, WAIT_LIMIT, threading.Event())
    assert world.hypervisor.power(spec.uuid).power is Power.RUNNING


def test_undefine_needs_a_vm_that_is_off_and_may_be_called_twice(world: World) -> None:
    domain = world.running()
    with pytest.raises(WrongState):
        world.hypervisor.undefine(domain, A)
    assert world.hypervisor.power(domain).power is Power.RUNNING
    world.hypervisor.destroy(domain, A)
    world.hypervisor.undefine(domain, A)
    assert world.hypervisor.power(domain).power is Power.ABSENT
    world.hypervisor.undefine(domain, A)
    assert not world.hypervisor.owned()


def test_a_vm_of_another_container_with_the_same_uuid_is_left_alone(world: World) -> None:
    earlier = world.spec("a")
    world.hypervisor.define(earlier)
    later = world.spec("b", uuid=earlier.uuid)
    world.hypervisor.define(later)
    world.hypervisor.start(later.uuid)
    world.hypervisor.destroy(earlier.uuid, earlier.container_id)
    assert world.hypervisor.power(later.uuid).power is Power.RUNNING
    world.hypervisor.destroy(later.uuid, later.container_id)
    world.hypervisor.undefine(earlier.uuid, earlier.container_id)
    assert world.hypervisor.power(later.uuid).power is Power.OFF
    assert [domain.container_id for domain in world.hypervisor.owned()] == [later.container_id]


def test_a_running_vm_is_not_redefined(world: World) -> None:
    domain = world.running()
    with pytest.raises(WrongState):
        world.hypervisor.define(world.spec())
    assert world.hypervisor.power(domain).power is Power.RUNNING


def test_a_foreign_vm_with_a_known_uuid_is_never_touched(world: World) -> None:
    spec = world.spec()
    world.add_foreign(spec.uuid, "somebody-elses")
    with pytest.raises(AlreadyExists):
        world.hypervisor.define(spec)
    assert world.hypervisor.power(spec.uuid).power is Power.ABSENT
    world.hypervisor.ask_to_shut_down(spec.uuid)
    world.hypervisor.destroy(spec.uuid, spec.container_id)
    world.hypervisor.undefine(spec.uuid, spec.container_id)
    with pytest.raises(NotFound):
        world.hypervisor.start(spec.uuid)
    assert world.foreign_runs(spec.uuid)
    assert not world.hypervisor.owned()


def test_the_name_of_a_foreign_vm_is_refused(world: World) -> None:
    spec = world.spec()
    world.add_foreign(uuid.uuid4(), spec.name)
    with pytest.raises(AlreadyExists):
        world.hypervisor.define(spec)
    assert not world.hypervisor.owned()


def test_another_nodes_vm_is_foreign(world: World) -> None:
    spec = world.spec()
    world.add_other_node(spec.uuid, "other-nodes")
    with pytest.raises(AlreadyExists):
        world.hypervisor.define(spec)
    world.hypervisor.destroy(spec.uuid, spec.container_id)
    assert world.foreign_runs(spec.uuid)
    assert not world.hypervisor.owned()


def test_a_watcher_gets_events_of_its_own_vm_only(world: World) -> None:
    for digit in "ab":
        world.hypervisor.define(world.spec(digit))
    with (
        world.hypervisor.watching(world.spec("a").uuid) as first,
        world.hypervisor.watching(world.spec("a").uuid) as second,
        world.hypervisor.watching(world.spec("b").uuid) as other,
    ):
        # Definitions are events too, and may come late.
        for event in (first, second, other):
            event.wait(0.2)
            event.clear()
        world.hypervisor.start(world.spec("a").uuid)
        assert first.wait(WAIT_LIMIT)
        assert second.wait(WAIT_LIMIT)
        assert not other.wait(0.2)


def test_callbacks_run_on_other_threads_even_after_one_failed(world: World) -> None:
    seen: list[tuple[uuid.UUID, int]] = []
    off = threading.Event()
    spec = world.spec()

    def bad(domain: uuid.UUID) -> None:
        raise RuntimeError(f"bad callback for {domain}")

    def callback(domain: uuid.UUID) -> None:
        seen.append((domain, threading.get_ident()))
        if world.hypervisor.power(domain).power is Power.OFF and off_wanted.is_set():
            off.set()

    off_wanted = threading.Event()
    world.hypervisor.on_power_event(bad)
    world.hypervisor.on_power_event(callback)
    world.hypervisor.define(spec)
    world.hypervisor.start(spec.uuid)
    off_wanted.set()
    world.hypervisor.destroy(spec.uuid, spec.container_id)
    assert off.wait(WAIT_LIMIT)
    assert {domain for domain, _ in seen} == {spec.uuid}
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_text_that_xml_cannot_hold_is_refused_and_nothing_is_defined(
    world: World, request: pytest.FixtureRequest
) -> None:
    if "fake" in request.node.name:
        return  # a fake has no XML
    with pytest.raises(InvalidRequest):
        world.hypervisor.define(world.spec(title="tab\tand\x00zero"))
    assert not world.hypervisor.owned()


def test_a_working_hypervisor_reports_no_trouble(world: World) -> None:
    assert world.hypervisor.trouble() == ""


def test_a_new_definition_keeps_its_title_and_has_not_run(world: World) -> None:
    spec = world.spec(title="default/web/vm")
    world.hypervisor.define(spec)
    found = world.inventory.domain_metadata(spec.uuid)
    assert (found.title, found.has_run) == (spec.title, False)


def test_a_definition_without_a_record_yields_no_record(world: World) -> None:
    world.hypervisor.define(world.spec())
    kept: list[str] = []
    world.inventory.take_records_out(lambda _, text: kept.append(text))
    assert kept == []


def test_only_this_nodes_vms_are_remembered(world: World) -> None:
    domain = uuid.uuid4()
    world.add_foreign(domain, "somebody-elses")
    with pytest.raises(NotFound):
        world.inventory.domain_metadata(domain)


def test_the_census_lists_only_this_nodes_vms(world: World) -> None:
    world.add_foreign(uuid.uuid4(), "somebody-elses")
    world.add_other_node(uuid.uuid4(), "another-nodes")
    domain = world.running()
    inventory = world.inventory.take()
    assert [(found.uuid, found.state.power) for found in inventory.owned] == [(domain, Power.RUNNING)]
    assert not inventory.unreadable


def test_a_vm_keeps_the_machine_type_that_its_guest_knows(world: World) -> None:
    """Only QEMU's driver has machines of several versions."""
    spec = world.spec(machine="pc-q35-6.2")
    world.hypervisor.define(spec)
    if isinstance(world.hypervisor, LibvirtHypervisor) and world.hypervisor.machine_type:
        assert re.fullmatch(r"pc-q35-[0-9.]+", world.hypervisor.machine_type)
        assert "pc-q35-6.2" in world.control.definition(spec.uuid)


def test_a_vm_starts_with_all_hardware_that_a_pod_may_request(world: World) -> None:
    """Beside UEFI and TPM, which the real Debian guest has."""
    hardware = HardwareOptions(
        cache=Cache.DIRECTSYNC, io=DiskIo.NATIVE, video=Video.VIRTIO, watchdog=True, topology=Topology(1, 1, 1),
        hyperv=True, clock=Clock.LOCALTIME, tablet=True,
    )  # fmt: skip
    screen = str(world.directory / "vnc" / "vnc.sock")
    spec = world.spec(disk_bus=DiskBus.SATA, vnc_socket=screen, hardware=hardware)
    world.hypervisor.define(spec)
    world.hypervisor.start(spec.uuid)
    assert world.hypervisor.power(spec.uuid).power is Power.RUNNING
