"""virtshim knows which disks and devices libvirt must release before another VM may have them."""

from __future__ import annotations

import pytest

from virtshim.model.ids import ContainerId
from virtshim.model.sandbox import vm_disk_name, vm_uuid
from virtshim.vm.ends import has_reusable_parts

OWN = ContainerId("a" * 64)
ROOT = f"<disk type='file'><source file='/state/containers/{OWN}/root.qcow2'/></disk>"


LASTING = vm_disk_name("default", "db", "vm")


def definition(devices: str, system: str = "", uuid: object = "") -> str:
    return f"<domain><uuid>{uuid}</uuid><os>{system}</os><devices>{ROOT}{devices}</devices></domain>"


@pytest.mark.parametrize(
    "devices",
    [
        "",
        "<disk type='file' device='cdrom'/>",
        "<disk type='file'><source file='/elsewhere/seed.iso'/><readonly/></disk>",
        "<hostdev/>",
    ],
)
def test_devices_removed_with_their_container_are_not_handed_on(devices: str) -> None:
    assert not has_reusable_parts(definition(devices), OWN)


@pytest.mark.parametrize(
    ("devices", "system"),
    [
        ("<disk type='block'><source dev='/dev/sdb'/></disk>", ""),
        ("<disk type='block'><source dev='/dev/sdb'/><readonly/></disk>", ""),
        ("<disk type='file'><source file='/state/pods/p/d.qcow2'/></disk>", ""),
        ("<tpm model='tpm-crb'/>", ""),
        ("", "<nvram>/state/pods/p/d.nvram</nvram>"),
    ],
)
def test_disks_and_devices_that_remain_may_be_handed_on_to_the_next_vm(devices: str, system: str) -> None:
    assert has_reusable_parts(definition(devices, system), OWN)


def test_the_root_disk_of_a_vm_that_outlives_its_pods_belongs_to_the_vms_of_one_uuid() -> None:
    disk = f"<disk type='file'><source file='/state/{LASTING}.qcow2'/></disk>"
    assert not has_reusable_parts(definition(disk, uuid=vm_uuid(LASTING)), OWN)
    for other in (vm_uuid(vm_disk_name("default", "other", "vm")), OWN.domain_uuid()):
        assert has_reusable_parts(definition(disk, uuid=other), OWN)
    both = disk + "<disk type='block'><source dev='/dev/sdb'/></disk>"
    assert has_reusable_parts(definition(both, uuid=vm_uuid(LASTING)), OWN)
