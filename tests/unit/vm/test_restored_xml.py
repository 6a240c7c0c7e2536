"""A saved VM continues with what its guest saw before; the rest of its definition is the new container's."""

from __future__ import annotations

import dataclasses
import os
import uuid
from pathlib import Path

import pytest
from lxml import etree

from virtshim.model.cgroup import CgroupLimits
from virtshim.model.errors import WrongState
from virtshim.model.hardware import HardwareOptions
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import DiskFormat
from virtshim.model.vm import DeviceNumbers, Disk, DiskBus, VmSize, VmSpec
from virtshim.vm import domain_xml
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.file_owner import QemuIds
from virtshim.vm.restored_xml import arriving_xml, restored_xml

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "restored_xml.xml"
NODE = NodeProfile(
    "node-1", DomainType.KVM, "/usr/lib/virtshim/vmwrapper", "/usr/bin/qemu-system-x86_64", Cgroups.V2,
    confine=("landlock", "seccomp"), output_pipes="/libvirt/output",
)  # fmt: skip
MOVED = {"/state/containers/one": "/state/containers/two", "/run/vm/one": "/run/vm/two"}


def spec(container: str, **changes: object) -> VmSpec:
    """The VM's definition in that container."""
    made = VmSpec(
        uuid=uuid.UUID("11111111-2222-5333-8444-555555555555"),
        name="virtshim-111111112222-db",
        container_id=ContainerId({"one": "1", "two": "2"}[container] * 64),
        sandbox_id=SandboxId("5" * 64),
        size=VmSize(vcpus=1, max_vcpus=4, memory_bytes=128 << 20),
        disk_bus=DiskBus.VIRTIO,
        disks=(
            Disk("/state/vms/x/root.qcow2", DiskFormat.QCOW2, "root"),
            Disk(f"/state/containers/{container}/seed.iso", DiskFormat.RAW, "seed", readonly=True, cdrom=True),
        ),
        console_socket=f"/run/vm/{container}/console.sock",
        console_log=f"/state/containers/{container}/console.log",
        agent_socket=f"/run/vm/{container}/agent.sock",
        exec_sockets=(f"/run/vm/{container}/exec-0.sock",),
        fetch_key=f"key-of-{container}",
        tapmanager_socket="/run/tapmanager.sock",
        machine="pc-q35-7.2",
        numbers=DeviceNumbers((3, 4), (), (0,)),
        hardware=HardwareOptions(tpm=True),
        keeps_tpm=True,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def definition(made: VmSpec, uid: int) -> str:
    return domain_xml.build(made, NODE, QemuIds(uid, 108, is_its_own=True))


def saved() -> str:
    """As libvirt shows a VM that runs: with a port that was plugged in, a vCPU that was added, and aliases."""
    root = etree.fromstring(definition(spec("one"), 2_000_001).encode())
    root.find("vcpu").set("current", "2")
    devices = root.find("devices")
    plugged = etree.SubElement(devices, "channel", type="unix")
    etree.SubElement(plugged, "source", mode="bind", path="/run/vm/one/exec-12.sock")
    etree.SubElement(plugged, "target", type="virtio", name="io.virtshim.exec.12", state="connected")
    etree.SubElement(plugged, "alias", name="channel13")
    return etree.tostring(root, encoding="unicode")


def test_the_definition_is_as_the_golden_file_has_it() -> None:
    own = definition(spec("two", limits=CgroupLimits(cpu_shares=2048), fetch_key="new"), 2_000_002)
    text = restored_xml(saved(), own, MOVED)
    root = etree.fromstring(text.encode())
    etree.indent(root)
    found = etree.tostring(root, encoding="unicode") + "\n"
    if os.environ.get("GOLDEN_UPDATE"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


def test_nothing_of_the_earlier_container_is_left() -> None:
    text = restored_xml(saved(), definition(spec("two"), 2_000_002), MOVED)
    for word in ("/one", "key-of-one", "2000001"):
        assert word not in text


def test_the_guest_sees_what_it_saw() -> None:
    text = restored_xml(saved(), definition(spec("two", machine="pc-q35-9.9"), 2_000_002), MOVED)
    assert 'machine="pc-q35-7.2"' in text
    assert 'current="2"' in text
    assert "/run/vm/two/exec-12.sock" in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "virtshim-another"}, "is that of VM virtshim-111111112222-db"),
        ({"disks": spec("two").disks[:1], "numbers": DeviceNumbers((3,), (), (0,))}, "only one of the two has"),
    ],
)
def test_a_state_of_another_vm_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(WrongState, match=why):
        restored_xml(saved(), definition(spec("two", **changes), 2_000_002), MOVED)


def test_a_saved_definition_that_names_files_by_entities_is_refused() -> None:
    hostile = saved().replace("<domain", '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/hostname">]><domain', 1)
    hostile = hostile.replace("<devices>", "<description>&x;</description><devices>", 1)
    with pytest.raises(WrongState, match="document type"):
        restored_xml(hostile, definition(spec("two"), 2_000_002), MOVED)


# --- a VM that is about to arrive from another node


def arriving(theirs: str) -> etree._Element:
    return etree.fromstring(arriving_xml(theirs, definition(spec("two"), 2_000_002), MOVED).encode())


def test_a_vm_of_another_node_waits_for_its_memory_in_an_emulator_of_this_node() -> None:
    theirs = saved().replace("/usr/lib/virtshim/vmwrapper", "/opt/vmwrapper")
    result = arriving(theirs)
    assert result.findtext("devices/emulator") == "/usr/lib/virtshim/vmwrapper"
    assert [one.get("value") for one in result.iterfind("{*}commandline/{*}arg")] == ["-incoming", "defer"]
    assert result.find("devices/channel/source[@path='/run/vm/two/exec-12.sock']") is not None


def test_devices_that_libvirt_adds_itself_may_be_missing() -> None:
    own = definition(spec("two"), 2_000_002).replace(
        "<devices>", '<devices><input type="mouse" bus="ps2"/><audio id="1" type="none"/>', 1
    )
    assert "incoming" in arriving_xml(saved(), own, MOVED)


def test_a_vm_whose_cpu_libvirt_has_expanded_may_arrive() -> None:
    root = etree.fromstring(saved().encode())
    cpu = root.find("cpu")
    for name in list(cpu.attrib):
        del cpu.attrib[name]
    cpu.attrib.update({"mode": "custom", "match": "exact", "check": "full"})
    etree.SubElement(cpu, "model", fallback="forbid").text = "EPYC"
    etree.SubElement(cpu, "vendor").text = "AMD"
    etree.SubElement(cpu, "feature", policy="require", name="x2apic")
    assert arriving(etree.tostring(root, encoding="unicode")).findtext("cpu/model") == "EPYC"


@pytest.mark.parametrize(
    "place",
    [
        "devices/emulator",  # libvirt would run QEMU without vmwrapper, which confines it
        "{*}commandline",  # vmwrapper would not know how to confine it
        "devices/disk/readonly",
        "devices/panic",
    ],
)
def test_a_definition_of_another_node_that_lacks_something_is_refused(place: str) -> None:
    root = etree.fromstring(saved().encode())
    found = root.find(place)
    found.getparent().remove(found)
    with pytest.raises(WrongState, match="its pod on this node"):
        arriving(etree.tostring(root, encoding="unicode"))


def test_a_definition_of_another_node_cannot_have_its_parts_in_other_places() -> None:
    root = etree.fromstring(saved().encode())
    emulator = root.find("devices/emulator")
    root.find("devices/disk").append(emulator)
    with pytest.raises(WrongState, match="its pod on this node"):
        arriving(etree.tostring(root, encoding="unicode"))


def test_a_definition_of_another_node_cannot_make_another_disk_the_one_that_is_only_read() -> None:
    root = etree.fromstring(saved().encode())
    disks = root.findall("devices/disk")
    disks[0].append(disks[1].find("readonly"))
    with pytest.raises(WrongState, match="other rights to the disk"):
        arriving(etree.tostring(root, encoding="unicode"))


@pytest.mark.parametrize(
    "path",
    [
        "/state/vms/x/vm.json",  # libvirt would remove the file, as root
        "/state/containers/two/record.json",
        "/run/vm/two/../../vm.sock",
        "/run/vm/two/agent.sock",
        "/state/containers/two/exec-1.sock",
    ],
)
def test_a_port_from_another_node_has_its_socket_beside_those_of_the_container(path: str) -> None:
    directories = {**MOVED, "/state/vms/x": "/state/vms/x"}
    theirs = saved().replace("/run/vm/one/exec-12.sock", path)
    with pytest.raises(WrongState, match="its pod on this node does not have"):
        arriving_xml(theirs, definition(spec("two"), 2_000_002), directories)


@pytest.mark.parametrize("memory", ['<memory unit="GiB">1000</memory>', "<memory>much</memory>", ""])
def test_a_definition_whose_memory_cannot_be_compared_is_refused(memory: str) -> None:
    theirs = saved().replace('<memory unit="KiB">131072</memory>', memory)
    assert theirs != saved()
    with pytest.raises(WrongState, match="memory in KiB"):
        arriving(theirs)


def test_a_vm_that_has_arrived_is_saved_and_continued_like_any_other() -> None:
    again = restored_xml(etree.tostring(arriving(saved()), encoding="unicode"), definition(spec("two"), 2_000_002), {})
    assert "-incoming" not in again


HOSTILE = {
    "a device of the host": ("</devices>", '<hostdev mode="subsystem" type="pci"><source/></hostdev></devices>'),
    "a shared directory": (
        "</devices>",
        '<filesystem type="mount"><source dir="/"/><target dir="x"/></filesystem></devices>',
    ),
    "a network card": ("</devices>", '<interface type="bridge"><source bridge="br0"/></interface></devices>'),
    "a socket outside": ("/run/vm/one/exec-12.sock", "/run/docker.sock"),
    "a socket above": ("/run/vm/one/exec-12.sock", "/run/vm/one/../../docker.sock"),
    "a port to the network": (
        "</devices>",
        '<channel type="tcp"><source mode="connect" host="10.0.0.1" service="1"/><target type="virtio"/></channel></devices>',
    ),
    "another console log": ("/state/containers/one/console.log", "/etc/cron.d/console"),
    "another firmware": ("<os>", '<os><loader readonly="yes" type="pflash">/etc/shadow</loader>'),
    "a kernel": ("<os>", "<os><kernel>/etc/shadow</kernel>"),
    "more arguments": ("<qemu:env ", '<qemu:env name="LD_PRELOAD" value="x"/><qemu:env '),
    "an override of a device": (
        "<qemu:property ",
        '<qemu:property name="path" type="string" value="x"/><qemu:property ',
    ),
    "a second disk": (
        "</devices>",
        '<disk type="file"><source file="/x"/><target dev="vdz" bus="virtio"/></disk></devices>',
    ),
    "another domain type": ('type="kvm"', 'type="xen"'),
    "an entity": ("<domain", '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/hostname">]><domain'),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_node_gets_nothing_into_the_definition(what: str) -> None:
    before, now = HOSTILE[what]
    theirs = saved()
    assert before in theirs, "the test changes something"
    try:
        root = arriving(theirs.replace(before, now, 1))
    except WrongState:
        return
    own = etree.fromstring(definition(spec("two"), 2_000_002).encode())
    assert {value for one in root.iter() for value in one.attrib.values()} - {
        value for one in own.iter() for value in one.attrib.values()
    } <= {"-incoming", "defer", "2", "/run/vm/two/exec-12.sock", "io.virtshim.exec.12", "connected", "channel13"}
    assert root.get("type") == own.get("type")
