"""The XML of a VmSpec matches golden files exactly. GOLDEN_UPDATE=1 rewrites them; the diff is the review."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import re
import uuid
from pathlib import Path

import pytest
from lxml import etree

from virtshim.devices.guest_view import GUEST_VIEW_MAX_BLOCK_DEVICES, GUEST_VIEW_MAX_PCI_DEVICES
from virtshim.devices.values import (
    BlockDevice,
    GrantedDevices,
    MediatedDevice,
    PciAddress,
    PciFunction,
    UsbDevice,
    VdpaDevice,
)
from virtshim.model.cgroup import CgroupLimits
from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import (
    Cache,
    Clock,
    DiskIo,
    Firmware,
    FirmwareFiles,
    HardwareOptions,
    NicModel,
    Topology,
    Video,
)
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Backing, CpuDetails, CpuModel, DeviceNumbers, Disk, DiskBus, NumaCell, VmSize, VmSpec
from virtshim.vm import domain_xml
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements import disk as disk_device
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.file_owner import QemuIds

PROJECT = Path(__file__).resolve().parents[3]
BUILDERS = ("domain_xml.py", "ownership.py", "cpu_query.py")
GOLDEN = PROJECT / "tests" / "golden" / "domain_xml"
SCHEMA = Path("/usr/share/libvirt/schemas/domain.rng")

IMAGE = Backing("/state/images/sha256/i", DiskFormat.RAW)
ROOT = Disk("/state/containers/c/root.qcow2", DiskFormat.QCOW2, "root", backing=IMAGE)
SEED = Disk("/state/containers/c/seed.iso", DiskFormat.RAW, "seed", readonly=True, cdrom=True)
VOLUME = Disk("/dev/sdb", DiskFormat.RAW, "root", is_device=True, data_at=512, data_bytes=(1 << 30) - 512)
PLAIN = VmSpec(
    uuid=uuid.UUID("11111111-2222-5333-8444-555555555555"),
    name="virtshim-0123456789abcdef0123-app",
    container_id=ContainerId("c" * 64),
    sandbox_id=SandboxId("5" * 64),
    size=VmSize(vcpus=1, memory_bytes=128 << 20),
    disk_bus=DiskBus.SCSI,
    disks=(ROOT, SEED),
    console_socket="/run/virtshim/vm/c/console.sock",
    console_log="/state/containers/c/console.log",
    agent_socket="/run/virtshim/vm/c/agent.sock",
)


def sized(**changes: int) -> VmSize:
    return dataclasses.replace(PLAIN.size, **changes)


NODE = NodeProfile("node-1", DomainType.KVM, "/usr/lib/virtshim/vmwrapper", "/usr/bin/qemu-system-x86_64", Cgroups.OFF)
TCG = dataclasses.replace(NODE, domain_type=DomainType.QEMU)
LIMITS = CgroupLimits(
    cpu_shares=512,
    cpu_quota=150_000,
    cpu_period=100_000,
    cpuset_cpus="0-3,7",
    cpuset_mems="0",
    memory=384 << 20,
    swap=64 << 20,
)
HIGH = dataclasses.replace(LIMITS, swap=None, unified={"memory.high": str(300 << 20), "memory.oom.group": "1"})

GRANTED = GrantedDevices(
    passthrough=(
        PciFunction(PciAddress.parse("0000:3b:00.1"), "intel.com/sriov"),
        UsbDevice(1, 12),
        MediatedDevice("6b3c3c0e-5e8a-4a52-8a5f-1c6f1b0d0f11"),
        VdpaDevice("/dev/vhost-vdpa-0"),
        PciFunction(PciAddress.parse("10000:e1:1f.7")),
        UsbDevice(2, 3),
    ),
    blocks=(BlockDevice("/dev/loop3", "/dev/xvda"), BlockDevice("/dev/sdb1", "/dev/disks/archive", readonly=True)),
)
MANY = GrantedDevices(tuple(PciFunction(PciAddress(0, bus, 0, 0)) for bus in range(0x20, 0x20 + 9)))

CONFINED = dataclasses.replace(
    NODE, confine=("landlock", "seccomp"), parts=("/opt/qemu", "/opt/firmware"), output_pipes="/libvirt/output"
)

WINDOWS = HardwareOptions(nic_model=NicModel.E1000E, hyperv=True, clock=Clock.LOCALTIME, tablet=True)

ON_TWO_NODES = CgroupLimits(cpu_shares=512, cpuset_cpus="2-5,7,9", cpuset_mems="0-1")
CELLS = (
    NumaCell(0, frozenset({2, 3, 9, 7}), (0, 1, 3, 4), 160 << 20),
    NumaCell(1, frozenset({4, 5}), (2, 5), 96 << 20),
)

CASES: dict[str, tuple[VmSpec, NodeProfile] | tuple[VmSpec, NodeProfile, QemuIds]] = {
    "plain": (PLAIN, NODE),
    "limited_disks": (PLAIN, dataclasses.replace(NODE, disk_rates=disk_device.DiskRates(200, 20 << 20))),
    "tcg_virtio_blk": (dataclasses.replace(PLAIN, disk_bus=DiskBus.VIRTIO), TCG),
    "network_title_smbios": (
        dataclasses.replace(
            PLAIN,
            title='default/"pod" <&> näme',
            fetch_key="k-1",
            tapmanager_socket="/run/virtshim/tapmanager.sock",
            smbios_uuid=True,
        ),
        NODE,
    ),
    "ignition_beside_smbios": (
        dataclasses.replace(PLAIN, smbios_uuid=True, ignition_file="/state/containers/c/ignition.json"),
        NODE,
    ),
    "generation_id": (dataclasses.replace(PLAIN, generation_id=True), NODE),
    "sysprep_beside_scsi_disks": (
        dataclasses.replace(PLAIN, sysprep_iso="/state/containers/c/sysprep.iso"),
        NODE,
    ),
    "limits_cgroup_v1": (
        dataclasses.replace(PLAIN, size=sized(vcpus=2), limits=LIMITS, cgroup_parent="kubepods-pod1.slice"),
        dataclasses.replace(NODE, cgroups=Cgroups.V1),
    ),
    "limits_cgroup_v2_host_model": (
        dataclasses.replace(PLAIN, size=sized(vcpus=4), limits=HIGH, cpu_model=CpuModel.HOST_MODEL),
        dataclasses.replace(NODE, cgroups=Cgroups.V2),
    ),
    "named_cpu": (
        dataclasses.replace(
            PLAIN,
            cpu_model=CpuModel.CUSTOM,
            cpu_details=CpuDetails("Nehalem", features=(("vmx", "require"), ("aes", "disable"))),
        ),
        NODE,
    ),
    "three_disks": (
        dataclasses.replace(
            PLAIN,
            disks=(
                ROOT,
                Disk("/volumes/data, with comma.raw", DiskFormat.RAW, ""),
                Disk("/volumes/shared.qcow2", DiskFormat.QCOW2, "shared", readonly=True),
                SEED,
            ),
        ),
        NODE,
    ),
    "room_to_grow": (
        dataclasses.replace(
            PLAIN,
            size=sized(max_vcpus=4, max_memory_bytes=512 << 20),
            limits=LIMITS,
            cgroup_parent="/kubepods/x",
        ),
        NODE,
    ),
    "huge_pages": (dataclasses.replace(PLAIN, size=sized(page_bytes=2 << 20)), NODE),
    "screen": (dataclasses.replace(PLAIN, vnc_socket="/run/virtshim/vnc/c/vnc.sock"), NODE),
    "devices_of_the_host": (
        dataclasses.replace(PLAIN, granted=GRANTED, limits=LIMITS, cgroup_parent="kubepods-pod1.slice"),
        dataclasses.replace(NODE, cgroups=Cgroups.V2),
    ),
    "root_volume": (
        dataclasses.replace(
            PLAIN,
            disks=(VOLUME, SEED),
            granted=GrantedDevices(blocks=(BlockDevice("/dev/sdb", "/"), BlockDevice("/dev/sdc", "/data"))),
        ),
        CONFINED,
        QemuIds(64055, 108, gets_images=True).for_vm(2130706433),
    ),
    "disk_image_in_a_volume": (
        dataclasses.replace(
            PLAIN,
            granted=GrantedDevices(
                blocks=(
                    BlockDevice("/dev/sdc", "/dev/data"),
                    BlockDevice("/pods/1/volumes/a/disk.img", "/data", is_file=True),
                    BlockDevice("/pods/1/volumes/b/disk.img", "/read", readonly=True, is_file=True),
                )
            ),
        ),
        CONFINED,
        QemuIds(64055, 108, gets_images=True).for_vm(2130706433),
    ),
    "volumes": (dataclasses.replace(PLAIN, shares_socket="/run/virtshim/shares/c/fs.sock"), NODE),
    "vdpa_and_huge_pages": (
        dataclasses.replace(
            PLAIN,
            size=sized(page_bytes=2 << 20),
            granted=GrantedDevices((VdpaDevice("/dev/vhost-vdpa-0", "example.com/vdpa"),)),
        ),
        NODE,
    ),
    "nine_functions": (dataclasses.replace(PLAIN, granted=MANY, disk_bus=DiskBus.VIRTIO), TCG),
    "blocks_beside_virtio_disks": (
        dataclasses.replace(PLAIN, granted=dataclasses.replace(GRANTED, passthrough=()), disk_bus=DiskBus.VIRTIO),
        TCG,
    ),
    "uefi": (
        dataclasses.replace(
            PLAIN,
            disk_bus=DiskBus.VIRTIO,
            hardware=HardwareOptions(Firmware.UEFI, tpm=True),
            nvram="/state/containers/c/root.nvram",
        ),
        TCG,
    ),
    "kernel_in_the_image": (
        dataclasses.replace(
            PLAIN,
            hardware=HardwareOptions(kernel="/boot/a", initrd="/boot/b", kernel_args="console=ttyS0 quiet='<&>'"),
            kernel_file="/state/containers/c/kernel-a",
            initrd_file="/state/containers/c/kernel-b",
        ),
        TCG,
    ),
    "kernel_alone_by_uefi": (
        dataclasses.replace(
            PLAIN,
            hardware=HardwareOptions(Firmware.UEFI, kernel="/boot/a"),
            nvram="/state/containers/c/root.nvram",
            kernel_file="/state/containers/c/kernel-a",
        ),
        NODE,
    ),
    "secure_boot_and_kept_tpm": (
        dataclasses.replace(
            PLAIN,
            hardware=HardwareOptions(Firmware.SECURE, tpm=True),
            nvram="/state/pods/p/d.nvram",
            keeps_tpm=True,
            smbios_uuid=True,
        ),
        NODE,
    ),
    "known_firmware": (
        dataclasses.replace(
            PLAIN,
            hardware=HardwareOptions(Firmware.SECURE),
            nvram="/state/pods/p/d.secure.nvram",
            firmware_files=FirmwareFiles("/usr/share/OVMF/OVMF_CODE_4M.ms.fd", "/usr/share/OVMF/OVMF_VARS_4M.ms.fd"),
        ),
        NODE,
    ),
    "two_nodes": (
        dataclasses.replace(
            PLAIN,
            size=sized(vcpus=3, max_vcpus=6, max_memory_bytes=256 << 20),
            limits=ON_TWO_NODES,
            cells=CELLS,
            shares_socket="/run/virtshim/shares/c/fs.sock",
        ),
        NODE,
    ),
    "two_nodes_of_huge_pages": (
        dataclasses.replace(
            PLAIN,
            size=sized(vcpus=6, memory_bytes=256 << 20, page_bytes=2 << 20),
            limits=dataclasses.replace(ON_TWO_NODES, cpuset_mems=""),
            cells=CELLS,
        ),
        dataclasses.replace(NODE, cgroups=Cgroups.V2),
    ),
    "two_nodes_below_slices": (
        dataclasses.replace(PLAIN, size=sized(vcpus=6, memory_bytes=256 << 20), limits=ON_TWO_NODES, cells=CELLS),
        dataclasses.replace(NODE, cgroups=Cgroups.V2),
    ),
    "old_hardware": (dataclasses.replace(PLAIN, disk_bus=DiskBus.SATA, hardware=WINDOWS), TCG),
    "all_of_the_hardware": (
        dataclasses.replace(
            PLAIN,
            size=sized(vcpus=2, max_vcpus=4),
            vnc_socket="/run/virtshim/vnc/c/vnc.sock",
            fetch_key="k-1",
            tapmanager_socket="/run/virtshim/tapmanager.sock",
            hardware=dataclasses.replace(
                WINDOWS,
                cache=Cache.NONE,
                io=DiskIo.NATIVE,
                video=Video.VIRTIO,
                watchdog=True,
                topology=Topology(2, 1, 2),
            ),
        ),
        NODE,
    ),
    "known_places": (
        dataclasses.replace(
            PLAIN,
            disk_bus=DiskBus.VIRTIO,
            granted=dataclasses.replace(GRANTED, passthrough=GRANTED.passthrough[:1]),
            machine="pc-q35-7.2",
            numbers=DeviceNumbers((0, 1), (12, 9), (1, 0)),
            fetch_key="k-1",
            tapmanager_socket="/run/virtshim/tapmanager.sock",
        ),
        TCG,
    ),
    "user_of_its_own": (
        dataclasses.replace(PLAIN, granted=dataclasses.replace(GRANTED, passthrough=())),
        CONFINED,
        QemuIds(64055, 108, gets_images=True).for_vm(2130706433),
    ),
    "test_driver": (PLAIN, dataclasses.replace(NODE, domain_type=DomainType.TEST)),
}


# Cases on a libvirt that takes a short question about the guest's CPU; it counts for the mode of the first alone.
SHORT_CPU_QUERY = {"tcg_virtio_blk", "limits_cgroup_v2_host_model", "test_driver"}


@pytest.mark.parametrize("name", CASES)
def test_the_xml_is_as_reviewed(name: str) -> None:
    xml = domain_xml.build(*CASES[name], short_cpu_query=name in SHORT_CPU_QUERY)
    golden = GOLDEN / f"{name}.xml"
    if os.environ.get("GOLDEN_UPDATE") == "1":
        golden.write_text(xml)
    assert xml == golden.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.xml")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_libvirts_schema_accepts_it(name: str) -> None:
    if not SCHEMA.exists():
        pytest.skip(f"NOT TESTED: {SCHEMA} is missing; run make setup")
    schema = etree.RelaxNG(etree.parse(SCHEMA))
    document = etree.parse(GOLDEN / f"{name}.xml")
    assert schema.validate(document), schema.error_log


def _golden_names() -> set[str]:
    """Every element and attribute name, namespaces dropped."""
    found: set[str] = set()
    for path in GOLDEN.glob("*.xml"):
        for element in etree.parse(path).iter():
            found.add(etree.QName(element).localname)
            found.update(str(name) for name in element.attrib)
    return found


def _emitted_names() -> set[str]:
    """Every element and attribute name that the builders' source can emit: Element, SubElement, _text, qemu_tag and set."""
    found: set[str] = set()
    package = PROJECT / "virtshim" / "vm"
    for path in [
        package / "domain_xml.py",
        package / "ownership.py",
        package / "cpu_query.py",
        *(package / "elements").glob("*.py"),
    ]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            place = {"Element": 0, "SubElement": 1, "_text": 1, "qemu_tag": 0, "set": 0}.get(function)
            if place is None or len(call.args) <= place:
                continue
            name = call.args[place]
            if isinstance(name, ast.JoinedStr):  # "{namespace}tag"
                name = name.values[-1]
            if isinstance(name, ast.Constant):
                found.add(name.value.rpartition("}")[2])
            if function in ("Element", "SubElement"):
                found.update(word.arg for word in call.keywords if word.arg)
    return found


def test_each_element_and_attribute_we_can_emit_is_in_a_golden_file() -> None:
    emitted = _emitted_names()
    assert {"disk", "owner", "sandbox", "env", "partition", "discard"} <= emitted
    assert emitted - _golden_names() == set()


def _paths(document: etree._Element) -> set[str]:
    found = set()
    for element in document.iter():
        names = [etree.QName(e).localname for e in (*reversed(list(element.iterancestors())), element)]
        found.add("/".join(names))
        found.update("/".join([*names, f"@{name}"]) for name in element.attrib)
    return found


def test_no_combination_of_settings_has_a_path_that_is_in_no_golden_file() -> None:
    known: set[str] = set()
    for path in GOLDEN.glob("*.xml"):
        known |= _paths(etree.parse(path).getroot())
    everything = CASES["network_title_smbios"][0]
    for bus, kind, cgroups, model, limits, spec in itertools.product(
        DiskBus, DomainType, Cgroups, CpuModel, (LIMITS, CgroupLimits()), (PLAIN, everything, CASES["three_disks"][0])
    ):
        if kind is DomainType.QEMU and model is CpuModel.HOST_PASSTHROUGH:
            continue
        changed = dataclasses.replace(spec, disk_bus=bus, cpu_model=model, limits=limits)
        xml = domain_xml.build(changed, dataclasses.replace(NODE, domain_type=kind, cgroups=cgroups))
        assert _paths(etree.fromstring(xml)) - known == set()


def test_the_same_spec_gives_the_same_bytes() -> None:
    assert domain_xml.build(PLAIN, NODE) == domain_xml.build(dataclasses.replace(PLAIN), NODE)


def test_the_quota_is_the_whole_vms_and_never_below_libvirts_minimum() -> None:
    profile = dataclasses.replace(NODE, cgroups=Cgroups.V1)
    tiny = dataclasses.replace(
        PLAIN,
        size=sized(vcpus=8),
        limits=CgroupLimits(cpu_shares=1, cpu_quota=2000, cpu_period=5),
    )
    document = etree.fromstring(domain_xml.build(tiny, profile))
    assert document.findtext("cputune/global_quota") == "2000"
    assert document.findtext("cputune/global_period") == "1000"
    assert document.findtext("cputune/shares") == "2"
    assert etree.fromstring(domain_xml.build(PLAIN, profile)).find("cputune") is None


def test_libvirt_gets_no_limits_if_it_manages_no_cgroups() -> None:
    """It would refuse to start the VM; tapmanager makes the cgroup."""
    document = etree.fromstring(domain_xml.build(dataclasses.replace(PLAIN, limits=LIMITS, cgroup_parent="/x"), NODE))
    assert [tag for tag in ("cputune", "memtune", "numatune", "resource") if document.find(tag) is not None] == []


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("two_nodes")])
def test_memory_beyond_one_numa_node_comes_from_the_pods_other_nodes(name: str) -> None:
    """kubelet's memory manager counts what they have together: a guest that is bound to each is killed before that is used."""
    domain = etree.fromstring(domain_xml.build(*CASES[name]).encode())
    assert [node.get("mode") for node in domain.iterfind("numatune/memnode")] == ["preferred", "preferred"]


def test_a_limit_that_libvirt_has_no_name_for_is_refused() -> None:
    spec = dataclasses.replace(PLAIN, limits=CgroupLimits(unified={"memory.min": "1"}))
    with pytest.raises(InvalidRequest, match=r"unified\[memory\.min\]"):
        domain_xml.build(spec, dataclasses.replace(NODE, cgroups=Cgroups.V2))


@pytest.mark.parametrize("cgroups", [Cgroups.V1, Cgroups.V2])
def test_protected_memory_of_zero_is_no_request(cgroups: Cgroups) -> None:
    """kubelet's memory QoS sends both of every container."""
    spec = dataclasses.replace(PLAIN, limits=CgroupLimits(unified={"memory.min": "0", "memory.low": "0"}))
    node = dataclasses.replace(NODE, cgroups=cgroups)
    assert domain_xml.build(spec, node) == domain_xml.build(dataclasses.replace(PLAIN, limits=CgroupLimits()), node)


@pytest.mark.parametrize(("shares", "weight"), [(2, "1"), (1024, "39"), (262_144, "10000"), (9_999_999, "10000")])
def test_shares_become_the_weight_that_kubelet_would_set(shares: int, weight: str) -> None:
    spec = dataclasses.replace(PLAIN, limits=CgroupLimits(cpu_shares=shares))
    document = etree.fromstring(domain_xml.build(spec, dataclasses.replace(NODE, cgroups=Cgroups.V2)))
    assert document.findtext("cputune/shares") == weight


def _places(spec: VmSpec) -> list[tuple[int, int]]:
    """Slot and function of each device that is put on the root bus."""
    document = etree.fromstring(domain_xml.build(spec, NODE))
    addresses = document.findall("devices//address[@type='pci'][@bus='0x00']")
    return [(int(one.get("slot", ""), 16), int(one.get("function", ""), 16)) for one in addresses]


@pytest.mark.parametrize("bus", DiskBus)
def test_a_vm_with_all_devices_has_a_slot_for_each_and_none_is_a_nics(bus: DiskBus) -> None:
    full = dataclasses.replace(
        PLAIN,
        disk_bus=bus,
        disks=(dataclasses.replace(ROOT, serial=""),) * disk_device.MAX_DISKS[bus],
        granted=GrantedDevices(
            tuple(PciFunction(PciAddress(0, number, 0, 0)) for number in range(GUEST_VIEW_MAX_PCI_DEVICES)),
            tuple(BlockDevice(f"/dev/loop{n}", f"/dev/{n}") for n in range(GUEST_VIEW_MAX_BLOCK_DEVICES)),
        ),
    )
    places = _places(full)
    assert len(places) == len(set(places))
    assert all(1 <= slot < 0x10 and 0 <= function < 8 for slot, function in places)
    # The kernel looks at no other function of a slot whose first has no device.
    assert {(slot, 0) for slot, _ in places} <= set(places)


def test_a_vm_of_the_default_kind_has_no_bridge_to_walk() -> None:
    document = etree.fromstring(domain_xml.build(dataclasses.replace(PLAIN, disk_bus=DiskBus.VIRTIO), TCG))
    virtio = [
        *document.findall("devices/disk"),
        *document.findall("devices/rng"),
        *document.findall("devices/memballoon"),
    ]
    virtio += document.findall("devices/controller[@type='virtio-serial']")
    assert [device.find("address").get("bus") for device in virtio] == ["0x00"] * 5
    assert document.find("devices/controller[@type='pci']") is None


@pytest.mark.parametrize(
    ("overhead", "pages", "mib"), [(0, 0, 64), (128, 0, 64), (256, 0, 128), (256, 2, 128), (4096, 0, 1024)]
)
def test_translated_code_gets_half_of_qemus_own_memory(overhead: int, pages: int, mib: int) -> None:
    guest = 0 if pages else PLAIN.size.memory_bytes
    limits = CgroupLimits(memory=guest + (overhead << 20) if overhead else 0)
    spec = dataclasses.replace(PLAIN, size=sized(page_bytes=pages << 20), limits=limits)
    assert etree.fromstring(domain_xml.build(spec, TCG)).findtext("features/tcg/tb-cache") == str(mib)


@pytest.mark.parametrize(
    ("index", "name"),
    [(0, "sda"), (25, "sdz"), (26, "sdaa"), (51, "sdaz"), (52, "sdba"), (701, "sdzz"), (702, "sdaaa")],
)
def test_disks_are_named_as_by_linux(index: int, name: str) -> None:
    assert disk_device.target_name("sd", index) == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"title": "a\x00b"}, "U+0000"),
        ({"title": "two\nlines"}, "U+000A"),
        ({"title": "\udcff"}, "U+DCFF"),
        ({"title": "\ufffe"}, "U+FFFE"),
        ({"name": "a/b"}, "VM name"),
        ({"name": ""}, "VM name"),
        ({"name": "-x"}, "VM name"),
        ({"name": "x" * 201}, "VM name"),
        ({"size": sized(vcpus=0)}, "vCPUs"),
        ({"size": sized(vcpus=256)}, "vCPUs"),
        ({"size": sized(memory_bytes=0)}, "memory"),
        ({"disks": ()}, "disk"),
        ({"disks": (ROOT,) * 65}, "too many"),
        ({"disks": (ROOT,) * 41, "disk_bus": DiskBus.VIRTIO}, "too many"),
        ({"disks": (ROOT,) * 7, "disk_bus": DiskBus.SATA}, "too many"),
        ({"disks": (dataclasses.replace(ROOT, path="root.qcow2"),)}, "absolute"),
        ({"disks": (dataclasses.replace(ROOT, path="/a\nb"),)}, "U+000A"),
        ({"disks": (dataclasses.replace(ROOT, serial="s" * 37),)}, "serial"),
        ({"disks": (dataclasses.replace(ROOT, serial="s" * 21),), "disk_bus": DiskBus.VIRTIO}, "serial"),
        ({"disks": (dataclasses.replace(ROOT, serial="a,b"),)}, "serial"),
        ({"console_socket": "/" + "s" * 107}, "run_dir"),
        ({"agent_socket": "agent.sock"}, "absolute"),
        ({"fetch_key": "k", "tapmanager_socket": ""}, "tapmanager"),
        ({"fetch_key": "k\x01", "tapmanager_socket": "/t"}, "fetch key"),
    ],
)
def test_values_that_libvirt_cannot_take_are_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        domain_xml.build(dataclasses.replace(PLAIN, **changes), NODE)


def test_host_passthrough_needs_kvm() -> None:
    with pytest.raises(InvalidRequest, match="host-passthrough"):
        domain_xml.build(dataclasses.replace(PLAIN, cpu_model=CpuModel.HOST_PASSTHROUGH), TCG)


def test_a_node_without_an_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="node id"):
        dataclasses.replace(NODE, node="")


def test_no_definition_lets_the_kernel_merge_a_vms_memory_with_others() -> None:
    files = sorted(GOLDEN.glob("*.xml"))
    assert files
    assert [file.name for file in files if etree.parse(file).find("memoryBacking/nosharepages") is None] == []


def test_no_definition_turns_the_labels_of_apparmor_or_selinux_off() -> None:
    """A label without a model would be one of any, and `none` is none."""
    files = sorted(GOLDEN.glob("*.xml"))
    labels = [label for file in files for label in etree.parse(file).getroot().iter("seclabel")]
    assert {label.get("model") for label in labels} == {"dac"}
    assert "none" not in {label.get("type") for label in labels}


def test_enlightenments_are_left_out_without_kvm() -> None:
    spec = dataclasses.replace(PLAIN, hardware=WINDOWS)
    assert etree.fromstring(domain_xml.build(spec, NODE)).find("features/hyperv") is not None
    assert etree.fromstring(domain_xml.build(spec, TCG)).find("features/hyperv") is None


def test_a_cdrom_for_windows_has_the_last_port_of_sata_and_disks_the_others() -> None:
    """And is refused where they have all of them."""
    disks = (ROOT, SEED, *(dataclasses.replace(SEED, serial=f"more-{number}", cdrom=False) for number in range(3)))
    spec = dataclasses.replace(PLAIN, disk_bus=DiskBus.SATA, disks=disks, sysprep_iso="/state/containers/c/sysprep.iso")
    found = etree.fromstring(domain_xml.build(spec, NODE)).findall("devices/disk")
    names = [(one.find("target").get("dev"), one.find("address").get("unit")) for one in found]  # type: ignore[union-attr]
    assert names == [*zip(("sda", "sdb", "sdc", "sdd", "sde"), "01234", strict=True), ("sdzz", "5")]
    with pytest.raises(InvalidRequest, match=r"annotation virtshim.io/sysprep: 6 disks on SATA"):
        domain_xml.build(dataclasses.replace(spec, disks=(*disks, SEED)), NODE)
