"""The 20 documented uses of cloud-init in Virtlet, as requests for seeds: annotations, and the data of kubelet and CNI."""

from __future__ import annotations

from typing import Any, Final

from virtshim.annotations.parse import parse_vm_options
from virtshim.devices.values import BlockDevice
from virtshim.model.ids import ContainerId
from virtshim.model.image import DiskFormat
from virtshim.model.network import Dns, Interface, Route
from virtshim.model.sandbox import PodKey
from virtshim.seed.ports import SeedRequest
from virtshim.volumes.empty_disks import EmptyDisk
from virtshim.volumes.shares import SharedVolume

KEYS: Final = tuple(
    f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHUH1zzlzhSHrPmrF9JCvKRBPMUKQF3OaUXcSPxUFvRz {name}"
    for name in ("one", "two")
)
CONTAINER: Final = ContainerId("0123456789abcdef" * 4)
ENVS: Final = (("GREETING", b"hello"), ("WORDS", b"two words"))
DISKS: Final = tuple(
    EmptyDisk(name, 1 << 30, DiskFormat.QCOW2, guest, is_volume=True)
    for name, guest in (("opt", "/opt"), ("logs", "/var/log/app"), ("data", "/srv/data"))
)
BLOCKS: Final = tuple(BlockDevice(f"/dev/of-the-node-{letter}", f"/dev/disk-{letter}") for letter in "abc")
SHARED: Final = (SharedVolume("/opt", "/srv/of-the-node"),)
DNS: Final = Dns(("192.0.2.53",), ("some.example", "example"))
NIC: Final = Interface(
    "eth0",
    "02:00:00:00:00:01",
    1500,
    ("10.1.1.1/8",),
    (Route("0.0.0.0/0", "10.2.3.4"), Route("10.2.0.0/16", "10.2.3.4")),
)
NIC2: Final = Interface(
    "net1", "02:00:00:00:AB:CD", 9000, ("192.168.100.42/24",), (Route("0.0.0.0/0", "192.168.100.1"),)
)
KEPT_DISK: Final = "0123456789abcdef0123"

_USERS: Final = "users:\n- name: cloudy\n"
_OWN_FILE: Final = "write_files:\n- {path: /etc/own, content: mine}\n"
_KEYS: Final = {"VirtletSSHKeys": "\n".join(KEYS)}
_DRIVE: Final = {"VirtletCloudInitImageType": "configdrive"}
_TOKEN: Final = {"VirtletCloudInitUserDataScript": "#!/bin/sh\necho hi\n@virtlet-mount-script@"}
_MOUNTS: Final = {
    "VirtletCloudInitUserData": "mounts:\n- [/dev/other, /a]\n- [/dev/disk-a, /b]\n- [/dev/disk-b, /c, auto]\n"
}


def _seed(annotations: dict[str, str] | None = None, **given: Any) -> SeedRequest:
    plain: dict[str, Any] = {"interfaces": (), "dns": Dns()}
    return SeedRequest(
        container=CONTAINER,
        pod=PodKey("default", "foo", "uid-of-foo", 0),
        hostname="foo",
        options=parse_vm_options(annotations or {}),
        **{**plain, **given},
    )


CASES: Final = {
    "plain": _seed(),
    "config drive's meta-data": _seed(_DRIVE),
    "SSH keys": _seed(_KEYS),
    "SSH keys, and meta-data of its own": _seed({**_KEYS, "VirtletCloudInitMetaData": "instance-id: mine"}),
    "user-data": _seed({**_KEYS, "VirtletCloudInitUserData": _USERS}),
    "variables": _seed(envs=ENVS),
    "variables and user-data": _seed({"VirtletCloudInitUserData": _USERS + _OWN_FILE}, envs=ENVS),
    "script": _seed({**_KEYS, "VirtletCloudInitUserDataScript": "#!/bin/sh\necho hi\n"}),
    "disks to mount": _seed(empty_disks=DISKS),
    "shared directory": _seed(volumes=SHARED),
    "block volumes": _seed(blocks=BLOCKS),
    "block volumes, and disks to mount": _seed(_MOUNTS, blocks=BLOCKS[:2], empty_disks=DISKS[2:]),
    "persistent root disk": _seed(interfaces=(NIC,), dns=DNS, kept_disk=KEPT_DISK),
    "DHCP": _seed({"VirtletForceDHCPNetworkConfig": "true"}, interfaces=(NIC,), dns=DNS),
    "mounts in a script": _seed(_TOKEN, empty_disks=DISKS[:1]),
    "mounts and block volumes in a script": _seed(_TOKEN, empty_disks=DISKS[:1], blocks=BLOCKS[1:2]),
    "network": _seed(interfaces=(NIC,), dns=DNS),
    "several networks": _seed(interfaces=(NIC, NIC2), dns=DNS),
    "network on a config drive": _seed(_DRIVE, interfaces=(NIC,), dns=DNS),
    "several networks on a config drive": _seed(_DRIVE, interfaces=(NIC, NIC2), dns=DNS),
}
