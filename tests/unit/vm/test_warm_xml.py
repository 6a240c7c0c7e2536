"""Definitions of templates have nothing of a pod, and guests continue from them."""

from __future__ import annotations

import dataclasses
import uuid

import pytest
from lxml import etree

from virtshim.model.cgroup import CgroupLimits
from virtshim.model.hardware import Firmware, FirmwareFiles, HardwareOptions
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Backing, Disk, DiskBus, VmSize, VmSpec
from virtshim.vm import domain_xml
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.warm_xml import (
    TemplateNames,
    memory_bytes_in,
    on_memory_xml,
    template_xml,
    why_no_template,
)
from virtshim.vm.xml_text import QEMU_NAMESPACE

NODE = NodeProfile(
    "node-1", DomainType.KVM, "/usr/lib/virtshim/vmwrapper", "/usr/bin/qemu-system-x86_64", Cgroups.V2,
    confine=("landlock", "seccomp"), output_pipes="/libvirt/output",
)  # fmt: skip
IMAGE = "/state/images/sha256/abc"
TEMPLATE = ContainerId("e" * 64)


def spec(container: str = "one", **changes: object) -> VmSpec:
    made = VmSpec(
        uuid=uuid.uuid5(uuid.NAMESPACE_DNS, container),
        name=f"virtshim-{container}-vm",
        container_id=ContainerId({"one": "1", "two": "2"}[container] * 64),
        sandbox_id=SandboxId("5" * 64),
        size=VmSize(vcpus=1, max_vcpus=4, memory_bytes=128 << 20),
        disk_bus=DiskBus.VIRTIO,
        disks=(
            Disk(
                f"/state/containers/{container}/root.qcow2",
                DiskFormat.QCOW2,
                "root",
                backing=Backing(IMAGE, DiskFormat.QCOW2),
            ),
            Disk(f"/state/containers/{container}/seed.iso", DiskFormat.RAW, "seed", readonly=True, cdrom=True),
        ),
        console_socket=f"/run/vm/{container}/console.sock",
        console_log=f"/state/containers/{container}/console.log",
        agent_socket=f"/run/vm/{container}/agent.sock",
        limits=CgroupLimits(cpu_shares=512, cpuset_cpus="1"),
        title=f"default/{container}/vm",
        fetch_key=f"key-of-{container}",
        tapmanager_socket="/run/tapmanager.sock",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def definition(made: VmSpec, uid: int = 1001) -> str:
    return domain_xml.build(made, NODE, QemuIds(uid, 64055, is_its_own=True, gets_images=True))


def names(container: str = "one") -> TemplateNames:
    moved = {f"/state/containers/{container}": "/state/templates/e", f"/run/vm/{container}": "/run/vm/e"}
    return TemplateNames("virtshim-template-e", str(uuid.UUID(int=7)), TEMPLATE, SandboxId("f" * 64), 1009, moved)


def test_a_template_has_nothing_of_the_pod_whose_machine_it_is() -> None:
    text = template_xml(definition(spec()), names())
    for secret in ("key-of-one", "/one", "default/", "1" * 64, "5" * 64, "seed", "1001", "cpuset", "tapmanager"):
        assert secret not in text, secret
    assert TEMPLATE.value in text
    assert "/state/templates/e/root.qcow2" in text
    assert IMAGE in text
    assert "/libvirt/output/virtshim-template-e" in text
    assert "+1009:+64055" in text


def test_the_machine_of_a_template_does_not_depend_on_the_pod() -> None:
    one, two = spec("one"), spec("two", limits=CgroupLimits(), title="other/two/vm")
    assert template_xml(definition(one), names("one")) == template_xml(definition(two, 1002), names("two"))


def test_a_template_has_another_generation_id_than_its_guests_so_that_their_kernels_notice() -> None:
    own = definition(spec(generation_id=True)).replace("<genid />", f"<genid>{uuid.UUID(int=1)}</genid>")
    other = definition(spec(generation_id=True)).replace("<genid />", f"<genid>{uuid.UUID(int=2)}</genid>")
    made = etree.fromstring(template_xml(own, names()))
    assert [one.text for one in made.iterfind("genid")] == [None]
    assert template_xml(own, names()) == template_xml(other, names()), "guests with different ids have one template"
    for waits in (True, False):
        assert f"<genid>{uuid.UUID(int=1)}</genid>" in on_memory_xml(own, "/run/memory/x.sock", waits=waits)


@pytest.mark.parametrize(
    "change",
    [
        {"size": VmSize(vcpus=2, max_vcpus=4, memory_bytes=128 << 20)},
        {"size": VmSize(vcpus=1, max_vcpus=4, memory_bytes=256 << 20)},
        {"hardware": HardwareOptions(watchdog=True)},
        {"exec_sockets": ("/run/vm/one/exec-0.sock",)},
        {"disk_bus": DiskBus.SCSI},
        {"generation_id": True},
    ],
)
def test_another_machine_is_another_template(change: dict[str, object]) -> None:
    assert template_xml(definition(spec()), names()) != template_xml(definition(spec(**change)), names())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {
                "hardware": HardwareOptions(firmware=Firmware.UEFI),
                "nvram": "/x.nvram",
                "firmware_files": FirmwareFiles("/code", "/vars"),
            },
            "UEFI",
        ),
        ({"hardware": HardwareOptions(tpm=True)}, "TPM"),
        ({"shares_socket": "/run/shares/fs.sock"}, "virtiofs"),
        ({"smbios_uuid": True}, "SMBIOS"),
        ({"kernel_file": "/state/containers/one/kernel"}, "kernel"),
        ({"size": VmSize(vcpus=1, memory_bytes=128 << 20, page_bytes=2 << 20)}, "huge pages"),
        ({"disk_bus": DiskBus.SATA}, "SATA"),
    ],
)
def test_a_machine_that_no_template_can_have_is_named(change: dict[str, object], why: str) -> None:
    assert why in why_no_template(definition(spec(**change)))
    assert why_no_template(definition(spec())) == ""


def test_a_guest_on_offered_memory_waits_for_its_devices_and_a_template_boots() -> None:
    for waits in (True, False):
        root = etree.fromstring(on_memory_xml(definition(spec()), "/run/memory/x.sock", waits=waits))
        line = root.find(f"{{{QEMU_NAMESPACE}}}commandline")
        assert line is not None
        found = {one.get("name"): one.get("value") for one in line.iterfind(f"{{{QEMU_NAMESPACE}}}env")}
        assert found["VIRTSHIM_MEMORY"] == "/run/memory/x.sock"
        assert found["VIRTSHIM_FETCH_KEY"] == "key-of-one"
        words = [one.get("value") for one in line.iterfind(f"{{{QEMU_NAMESPACE}}}arg")]
        assert words == (["-incoming", "defer"] if waits else [])


def test_the_definition_says_how_large_the_memory_is() -> None:
    assert memory_bytes_in(definition(spec())) == 128 << 20
