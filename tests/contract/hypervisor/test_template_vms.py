"""A VM can boot on memory with a file behind it, and other VMs continue from there."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

import pytest
from contract.hypervisor.worlds import QEMU, A, World
from fakes.waiting import eventually

from virtshim.model.errors import ShimError
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Disk, Power
from virtshim.vm.warm_xml import TemplateNames, memory_bytes_in, template_xml
from vmwrapper import bundle

TEMPLATE = ContainerId("e" * 64)


@pytest.fixture
def world(world_with_memory: World, null_image: Path) -> World:
    """With vmwrapper, which gets the memory."""
    bundle.write(str(world_with_memory.directory / "vmwrapper"))
    shutil.copy(null_image, world_with_memory.directory / "root.qcow2")
    return world_with_memory


def defined(world: World) -> str:
    """The definition of a container's VM that is off."""
    root = Disk(str(world.directory / "root.qcow2"), DiskFormat.QCOW2, "root")
    spec = world.spec(disks=(root,), generation_id=True)
    world.hypervisor.define(spec)
    definition = world.templates.definition(spec.uuid, A)
    return definition.replace(f"<emulator>{QEMU}", f"<emulator>{world.directory}/vmwrapper")


def template_of(world: World, definition: str) -> tuple[uuid.UUID, int]:
    """A template that has booted, and its memory."""
    moved = {str(world.directory / "root.qcow2"): str(world.directory / "template.qcow2")}
    moved |= {str(world.directory / f"a.{end}"): str(world.directory / f"e.{end}") for end in ("sock", "log", "agent")}
    shutil.copy(world.directory / "root.qcow2", world.directory / "template.qcow2")
    names = TemplateNames("virtshim-template-e", str(TEMPLATE.domain_uuid()), TEMPLATE, SandboxId("f" * 64), 0, moved)
    world.templates.define(template_xml(definition, names), str(world.directory / "template.qcow2"))
    memory = os.memfd_create("template", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, memory_bytes_in(definition))
    world.templates.boot(TEMPLATE.domain_uuid(), TEMPLATE, memory)
    return TEMPLATE.domain_uuid(), memory


def test_a_vm_continues_from_the_memory_and_the_devices_of_a_template(world: World) -> None:
    definition = defined(world)
    template, memory = template_of(world, definition)
    eventually(lambda: os.fstat(memory).st_blocks)
    assert world.hypervisor.power(template).power is Power.RUNNING
    devices = os.memfd_create("devices", os.MFD_CLOEXEC)
    world.pausing.pause(template, TEMPLATE)
    world.streams.leave_memory_out(template, TEMPLATE, left_out=True)
    world.streams.send(template, TEMPLATE, devices)
    eventually(lambda: world.streams.state(template, TEMPLATE).stopped)
    world.streams.go_on(template, TEMPLATE)
    eventually(lambda: world.streams.state(template, TEMPLATE).done)
    world.hypervisor.destroy(template, TEMPLATE)
    world.hypervisor.undefine(template, TEMPLATE)
    assert 0 < os.fstat(devices).st_size < 8 << 20  # without the memory
    before = os.pread(memory, 1 << 20, 0)

    if world.hypervisor.power(A.domain_uuid()).power is Power.OFF and "vmwrapper" in definition:
        world.templates.define(definition, str(world.directory / "root.qcow2"))
    world.templates.await_devices(A.domain_uuid(), A, memory)
    assert world.hypervisor.power(A.domain_uuid()).power is Power.PAUSED
    world.streams.leave_memory_out(A.domain_uuid(), A, left_out=True)
    again = os.open(f"/proc/self/fd/{devices}", os.O_RDONLY)
    world.streams.receive(A.domain_uuid(), A, again)
    os.close(again)
    eventually(lambda: world.streams.state(A.domain_uuid(), A).done)
    world.streams.leave_memory_out(A.domain_uuid(), A, left_out=False)
    world.pausing.resume(A.domain_uuid(), A)
    assert world.hypervisor.power(A.domain_uuid()).power is Power.RUNNING
    assert os.pread(memory, 1 << 20, 0) == before
    for one in (memory, devices):
        os.close(one)


def test_the_state_of_other_devices_lets_no_guest_run(world: World) -> None:
    definition = defined(world)
    if "vmwrapper" in definition:
        world.templates.define(definition, str(world.directory / "root.qcow2"))
    memory = os.memfd_create("memory", os.MFD_CLOEXEC)
    os.ftruncate(memory, memory_bytes_in(definition))
    world.templates.await_devices(A.domain_uuid(), A, memory)
    world.streams.leave_memory_out(A.domain_uuid(), A, left_out=True)
    devices = os.memfd_create("devices", os.MFD_CLOEXEC)
    os.pwrite(devices, b"nonsense" * 1000, 0)

    def is_refused() -> bool:
        return bool(world.streams.state(A.domain_uuid(), A).failed)

    with contextlib.suppress(ShimError):  # QEMU has ended
        world.streams.receive(A.domain_uuid(), A, devices)
        eventually(is_refused)
    assert world.hypervisor.power(A.domain_uuid()).power is not Power.RUNNING
    os.close(memory)
    os.close(devices)


def test_the_same_qemu_has_the_same_identity(world: World) -> None:
    assert world.templates.qemu() == world.templates.qemu() != ""
