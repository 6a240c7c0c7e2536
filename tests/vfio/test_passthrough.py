"""Devices from device plugins reach VMs, on a machine with IOMMU and SR-IOV. outer.py describes the machine, story.py
has the actions."""

from __future__ import annotations

import re

import hardware
import pytest
from hardware import EDU_RESOURCE, NVME_RESOURCE, SHARED_RESOURCE

pytestmark = [pytest.mark.devices, pytest.mark.timeout(2800)]

FIRST, SECOND, THIRD = hardware.VFS
_DISK = "1af4:1001"  # virtio, on the root bus


def lines(console: list[str], kind: str) -> list[str]:
    """The guest's output about its devices of that kind."""
    return [line.strip() for line in console if line.startswith(f"{kind} ")]


def test_the_machine_has_functions_in_separate_groups_and_one_shared_group(told):
    groups = told("hardware")["groups"]
    assert len({groups[address] for address in (*hardware.VFS, hardware.EDU)}) == 4
    assert groups[hardware.SHARED_EDU] == groups[hardware.SHARED_RNG]
    assert told("hardware")["drivers"] == {
        FIRST: "vfio-pci", SECOND: "vfio-pci", THIRD: "nvme", hardware.EDU: "vfio-pci",
        hardware.SHARED_EDU: "vfio-pci", hardware.SHARED_RNG: "virtio-pci",
    }  # fmt: skip


def test_the_device_plugin_offers_attachable_devices_as_healthy(told):
    offered = told("plugin")["offered"]
    assert offered[EDU_RESOURCE] == {hardware.EDU: "Healthy"}
    assert offered[NVME_RESOURCE] == {FIRST: "Healthy", SECOND: "Healthy", THIRD: "Unhealthy"}


def test_the_device_plugin_reports_why_a_function_cannot_be_attached(told):
    assert told("plugin")["offered"][SHARED_RESOURCE] == {hardware.SHARED_EDU: "Unhealthy"}
    log = told("plugin")["log"]
    assert re.search(rf"{THIRD}[^\n]*nvme", log)
    assert re.search(rf"{hardware.SHARED_RNG}[^\n]*virtio-pci", log)


def test_a_container_gets_the_device_nodes_of_its_groups_and_the_addresses(told):
    granted, groups = told("granted"), told("hardware")["groups"]
    assert granted["devices"] == ["/dev/vfio/vfio", f"/dev/vfio/{groups[hardware.EDU]}", f"/dev/vfio/{groups[FIRST]}"]
    assert sorted(granted["envs"].values()) == [hardware.EDU, FIRST]


def test_the_guest_reaches_registers_and_memory_through_a_granted_device(told):
    (found,) = lines(told("passthrough")["console"], "edu")
    assert found.endswith("id=010000ed factorial(10)=3628800 dma=equal")


def test_the_guest_drives_a_virtual_function_of_the_nvme_controller(told):
    found = lines(told("passthrough")["console"], "nvme")
    assert 'serial="outer" model="QEMU NVMe Ctrl" controller=1' in found[-1]


def test_a_block_volume_beside_granted_functions_becomes_a_disk(told):
    disks = [
        sum(line.endswith(_DISK) for line in lines(told(step)["console"], "pci"))
        for step in ("passthrough", "given again")
    ]
    assert disks[0] == disks[1] + 1


def test_devices_can_use_memory_that_is_shared_with_virtiofsd(told):
    """The guest printed it: `dma=equal`."""
    words = " ".join(told("passthrough")["words"])
    assert re.search(r'"driver": ?"vhost-user-fs-pci"', words), words
    assert re.search(r'"share": ?true', words), words
    (found,) = lines(told("passthrough")["console"], "edu")
    assert found.endswith("dma=equal")


def test_a_function_with_a_kernel_driver_is_lent_to_the_vm(told):
    assert told("passthrough")["drivers"][THIRD] == "vfio-pci"
    found = lines(told("passthrough")["console"], "nvme")
    assert 'serial="outer" model="QEMU NVMe Ctrl" controller=3' in found[0]


def test_each_device_has_the_predicted_guest_address(told):
    console = told("passthrough")["console"]
    assert lines(console, "pci")[1:] != []
    assert [line.split()[1] for line in lines(console, "edu") + lines(console, "nvme")] == [
        "01:00.0",
        "02:00.0",
        "03:00.0",
    ]


def test_a_vm_with_devices_runs_unprivileged_and_may_lock_its_memory(told):
    facts = told("passthrough")
    assert facts["uid"] != 0
    assert facts["memlock"] == "unlimited" or int(facts["memlock"]) > 1 << 30
    assert facts["vfio_users"] == ["qemu-system-x86"]


def test_tapmanager_never_takes_a_device_from_a_running_vm(told):
    asked = told("asked for back")
    assert "in use: a virtual machine has its IOMMU group" in asked["refusal"]
    assert asked["drivers"] == told("passthrough")["drivers"]


@pytest.mark.full
def test_a_vm_keeps_its_devices_across_a_restart_of_virtshim(told):
    after = told("daemon killed")
    assert after["same"], "the QEMU of before"
    assert after["states"] == ["CONTAINER_RUNNING"]
    assert after["drivers"] == told("passthrough")["drivers"]


def test_a_device_of_a_running_container_is_not_given_to_a_second_one(told):
    refused = told("claimed twice")
    assert refused["of"] == "create"
    assert refused["code"] == "FAILED_PRECONDITION"
    assert FIRST in refused["message"]
    assert refused["left"] == 0


def test_a_variable_that_names_a_device_without_a_grant_is_refused(told):
    refused = told("forged hint")
    assert (refused["of"], refused["code"], refused["left"]) == ("create", "INVALID_ARGUMENT", 0)
    assert "PCIDEVICE_EXAMPLE_COM_NVME_VF" in refused["message"]
    assert SECOND in refused["message"]


def test_a_grant_is_not_widened_by_a_variable(told):
    refused = told("forged beside a grant")
    assert (refused["of"], refused["code"], refused["left"]) == ("create", "INVALID_ARGUMENT", 0)
    assert "PCIDEVICE_OTHER" in refused["message"]


def test_a_group_with_a_function_at_another_driver_is_refused_before_qemu_starts(told):
    refused = told("group not viable")
    assert refused["code"] == "FAILED_PRECONDITION"
    assert hardware.SHARED_RNG in refused["message"]
    assert "virtio-pci" in refused["message"]
    assert refused["driver"] == "virtio-pci", "what was not granted keeps its driver"


@pytest.mark.full
def test_a_group_without_a_device_node_is_refused_with_the_remedy(told):
    refused, group = told("not bound"), told("hardware")["groups"][THIRD]
    assert refused["of"] == "create"
    assert f"/dev/vfio/{group}" in refused["message"]


def test_a_removed_container_releases_its_devices_unchanged(told):
    removed = told("removed")
    assert removed["qemus"] == 0
    assert removed["drivers"] == told("hardware")["drivers"]


@pytest.mark.full
def test_with_cdi_a_container_gets_names_and_no_device_nodes(told):
    assert told("granted by CDI")["cdi"] == [f"{NVME_RESOURCE}={FIRST}"]
    assert told("granted by CDI")["devices"] == []


def test_freed_devices_are_given_to_the_next_container(told):
    third, first = lines(told("given again")["console"], "nvme")
    assert "controller=3" in third
    assert "controller=1" in first


@pytest.mark.full
def test_a_vm_that_was_killed_is_started_again_with_the_same_devices(told):
    assert (told("killed")["state"], told("killed")["reason"]) == ("CONTAINER_EXITED", "Error")
    third, first = lines(told("restarted by kubelet")["console"], "nvme")
    assert "controller=3" in third
    assert "controller=1" in first


@pytest.mark.full
def test_removing_a_dead_container_leaves_its_successors_devices_alone(told):
    assert told("restarted by kubelet")["drivers"][THIRD] == "vfio-pci"
    assert told("restarted by kubelet")["vfio_users"] == ["qemu-system-x86"]


@pytest.mark.full  # test_node_restart.py takes a node down, too
def test_taking_a_node_down_with_a_running_vm_leaves_nothing(told):
    assert told("down")["left"] == []
    assert told("down")["drivers"] == told("hardware")["drivers"]
    assert told("end")["told"]
