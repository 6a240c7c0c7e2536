"""One record of each kind with every field set, and with text as nasty as callers may send."""

from __future__ import annotations

import dataclasses
from typing import Any

from virtshim.devices.values import (
    BlockDevice,
    BorrowedDevice,
    CriDevice,
    DeviceCondition,
    GrantedDevices,
    MediatedDevice,
    PciAddress,
    PciFunction,
    UsbDevice,
    VdpaDevice,
)
from virtshim.model.container import (
    Container,
    ContainerConfig,
    ContainerName,
    ContainerPhase,
    ContainerSpec,
    ContainerStatus,
    Exit,
    ExitReason,
    Mount,
    ProcessUser,
    Resources,
    RunAs,
)
from virtshim.model.ids import ContainerId, ImageDigest, ImageId, SandboxId
from virtshim.model.image import BootFile, DiskFormat, Image, ImageConfig
from virtshim.model.network import Dns, Interface, PodNetwork, PolicyRule, Route, TableRoute
from virtshim.model.sandbox import (
    Adoption,
    Namespaces,
    NamespaceScope,
    PodKey,
    PortMapping,
    Sandbox,
    SandboxConfig,
    SandboxPhase,
)
from virtshim.model.troubles import Trouble, TroubleKind
from virtshim.model.vm import DiskBus, VmSize
from virtshim.store.records import SqliteRecords
from virtshim.volumes.copies import CopiedVolume
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.memory_volumes import MemoryVolume, Tmpfs
from virtshim.volumes.shares import SharedVolume, VolumeImage

RESOURCES = Resources(2, 3, 4, 2**62, -1, -998, "0-3", "0", {"2MB": 2**64 - 1}, {"memory.max": "1"})
SANDBOX = Sandbox(
    id=SandboxId("a" * 64),
    key=PodKey("name space", "pöd\n", "uid'; drop table sandboxes; --", 2**32 - 1),
    config=SandboxConfig(
        hostname="web",
        log_directory="/var/log/pods/x",
        dns=Dns(("10.0.0.1", "fd00::1"), ("a.b",), ("ndots:5",)),
        port_mappings=(PortMapping("sctp", 1, 65535, "::"),),
        labels={"k": "v", "": "", "π": "\0\u2028"},
        annotations={"VirtletCloudInitUserData": "a: |\r\n  b\n", "x": "'\"\\"},
        cgroup_parent="/kubepods.slice",
        runtime_handler="virtshim",
        overhead=Resources(memory_limit_bytes=1),
        resources=Resources(cpu_quota=1),
        namespaces=Namespaces(NamespaceScope.CONTAINER, NamespaceScope.POD, NamespaceScope.CONTAINER),
        sysctls={"net.core.somaxconn": "'\"\\"},
    ),
    created_at=2**62,
    phase=SandboxPhase.NOT_READY,
    network=PodNetwork(
        netns="/run/netns/x",
        interfaces=(
            Interface(
                "eth0",
                "52:54:00:00:00:01",
                1450,
                ("10.0.0.2/24",),
                (Route("::/0", "fe80::1"),),
                rules=(PolicyRule(4, 32765, 100, "10.0.0.2/32", "10.9.0.0/16"),),
                table_routes=(TableRoute(100, "0.0.0.0/0", "10.0.0.1", "10.0.0.2", 5, 1400),),
            ),
        ),
        ips=("10.0.0.2", "fd00::2"),
        dns=Dns(("1.1.1.1",)),
        fetch_key="secret",
        inode=4026532401,
    ),
    network_released=True,
    reason="stopped",
    changed_overhead=Resources(memory_limit_bytes=2),
    changed_resources=Resources(cpu_quota=-1),
    disk_bus=DiskBus.VIRTIO,
    profile={"VirtletVCPUCount": "2"},
    adopted=Adoption("/var/run/netns/cni-1", ("10.1.2.3", "fd00::9")),
    root_disks={"vm": ImageDigest(f"sha256:{'3' * 64}")},
)
CONTAINER = Container(
    ContainerSpec(
        id=ContainerId("c" * 64),
        sandbox_id=SANDBOX.id,
        name=ContainerName("vm", 3),
        config=ContainerConfig(
            image="img",
            user_image="docker.io/img:1",
            command=("/init", ""),
            args=("--x", "y z"),
            working_dir="/",
            envs=(("TEXT", b"plain"), ("BYTES", bytes(range(256))), ("EMPTY", b""), ("TEXT", b"again")),
            mounts=(
                Mount("/a", "/b", True, recursive_read_only=True),
                Mount("/c", "/d", image="registry.test/files", image_sub_path="etc"),
            ),
            labels={"a": "b"},
            annotations={"c": "d"},
            log_path="vm/3.log",
            stdin=True,
            stdin_once=True,
            tty=True,
            stop_signal=15,
            readonly_root=True,
            user=RunAs("app", 7, (8, 9), own_groups=False, dropped=("all",), added=("chown",), no_new_privs=True),
            resources=RESOURCES,
            devices=(CriDevice("/dev/vfio/7", "/dev/vfio/7", "rw"),),
            cdi=("vendor.com/nic=vf0",),
        ),
        image=ImageDigest(f"sha256:{'1' * 64}"),
        uid=2130706433,
        passt_uid=2130706434,
        beside_pod=True,
        vm="database",
        save_on_stop=True,
        state_volume="/pods/1/state",
        warm_start=True,
        restore_from="node-2",
        image_ref="registry/x@sha256:1",
        domain_uuid="12345678-9abc-4def-8123-456789abcdef",
        created_at=5,
        log_file="/var/log/pods/x/vm/3.log",
        cgroup_parent="/kubepods.slice",
        pod_disk="p/d",
        command=("/bin/job", "-x"),
        granted=GrantedDevices(
            (
                PciFunction(PciAddress(0x10000, 0x3B, 0, 1), "intel.com/vf", "VF 1 of ens1f0"),
                MediatedDevice("6b3c3c0e-5e8a-4a52-8a5f-1c6f1b0d0f11", "nvidia.com/x"),
                UsbDevice(1, 2, "usb"),
                VdpaDevice("/dev/vhost-vdpa-0", "vdpa"),
            ),
            (BlockDevice("/dev/loop0", "/dev/xvda", readonly=True, identity="7:0", is_file=True),),
            ("hooks of /etc/cdi/gpu.json",),
        ),
        volumes=(
            SharedVolume(
                "/a",
                "/b",
                readonly=True,
                follows=True,
                image=VolumeImage(ImageDigest(f"sha256:{'e' * 64}"), ImageId(f"sha256:{'f' * 64}"), "r@sha256:e"),
            ),
        ),
        copies=(CopiedVolume("/c", "/d", readonly=False, renewed=False),),
        memory_volumes=(MemoryVolume("/m", "/host/m", Tmpfs(1 << 40, 0o2777, 1, 2**32 - 2), True),),
        empty_disks=(EmptyDisk("e", 1 << 30, DiskFormat.RAW, "/e", is_volume=True),),
        image_config=ImageConfig("app:7", ("A=ü",), ("/bin/x",), ("y",), "/srv", "SIGQUIT"),
        image_id=ImageId(f"sha256:{'3' * 64}"),
    ),
    ContainerStatus(
        phase=ContainerPhase.EXITED,
        started_at=6,
        exit=Exit(137, ExitReason.OOM_KILLED, 7, "oops"),
        size=VmSize(1, 2, 3, 4, 5),
        changed=RESOURCES,
        resizing=RESOURCES,
        trouble="paused",
        troubles=(Trouble(TroubleKind.PAUSED, "paused"),),
        mounts_confirmed=True,
        saving=True,
        renewing=True,
        known_as=ContainerId("e" * 64),
        arriving=True,
        warm_started=True,
        moved_to="node-3",
        checkpointing="/var/lib/kubelet/checkpoints/x.tar",
        command_begun=True,
        user=ProcessUser(7, 8, (8, 2**32 - 1)),
        stop_asked=True,
        ending=Exit(3, ExitReason.ERROR, 8, "why"),
        frozen=True,
        claims=("pci:10000:3b:00.1", "usb:001/002"),
        copied=("/c",),
        unmounted=True,
        paused=True,
    ),
)
BORROWED = BorrowedDevice(PciAddress(0, 0x3B, 0, 1), "iavf")
CONDITION = DeviceCondition(PciAddress(0, 0x3B, 0, 2), 9, "the device did not come out of it", 2)
IMAGE = Image(
    id=ImageId(f"sha256:{'3' * 64}"),
    digest=ImageDigest(f"sha256:{'2' * 64}"),
    tags=("a:1", "b:2"),
    repo_digests=("a@sha256:2",),
    size=2**60,
    virtual_size=2**61,
    format=DiskFormat.RAW,
    pulled_at=8,
    pinned=True,
    config=ImageConfig("app:7", ("A=ü",), ("/bin/x",), ("y",), "/srv", "SIGQUIT"),
    boot=(BootFile("/boot/vmlinuz", ImageDigest(f"sha256:{'4' * 64}"), 2**29),),
    tree=ImageDigest(f"sha256:{'e' * 64}"),
    taken=2**60 + 7,
)


def fill(records: SqliteRecords) -> None:
    records.sandboxes.add(SANDBOX)
    records.containers.add(CONTAINER)
    records.images.put(IMAGE)
    records.borrowed.put(BORROWED)
    records.device_conditions.put(CONDITION)


def sandbox(n: int, **changes: Any) -> Sandbox:
    key = PodKey("default", f"pod-{n}", "uid", 0)
    fields: dict[str, Any] = {"id": SandboxId(f"{n:064x}"), "key": key, "created_at": n} | changes
    return dataclasses.replace(SANDBOX, **fields)
