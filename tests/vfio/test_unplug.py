"""VMs with devices can be killed, and devices can fail. chapter_unplug.py has the actions."""

from __future__ import annotations

import re

import chapter_unplug
import hardware
import pytest

pytestmark = [pytest.mark.devices, pytest.mark.timeout(2800)]

FIRST = hardware.VFS[0]
AT_VFIO = dict.fromkeys((FIRST, hardware.EDU), "vfio-pci")


def is_over(facts: dict) -> bool:
    """Whether the VM is off and its devices are where they were."""
    return facts["qemus"] == 0 and {address: facts["drivers"][address] for address in AT_VFIO} == AT_VFIO


def unplugged(console: list[str]) -> list[str]:
    """The unplugged guest addresses that the guest reported."""
    return sorted(line.split()[1] for line in console if line.startswith("unplugged "))


def test_a_guest_releases_its_devices_before_it_is_killed(told):
    facts = told("unplug answered")
    assert unplugged(facts["console"]) == ["01:00.0", "02:00.0"]
    (line,) = facts["unplugged"]
    assert re.search(r"kept_by_guest=\[\]", line)
    assert (facts["state"], facts["code"]) == ("CONTAINER_EXITED", 137)
    assert facts["message"] == "killed: the guest did not shut down within 1 s"
    assert is_over(facts)


@pytest.mark.full
def test_a_guest_that_does_not_release_its_devices_is_killed_after_the_time_limit(told):
    facts = told("unplug ignored")
    assert unplugged(facts["console"]) == []
    (line,) = facts["unplugged"]
    assert "ua-host-pci1" in line
    assert "ua-host-pci2" in line
    (seconds,) = re.findall(r"seconds=([0-9.]+)", line)
    assert chapter_unplug.SECONDS <= float(seconds) < chapter_unplug.SECONDS + 3
    assert facts["message"] == "killed: no grace period"
    assert is_over(facts)


@pytest.mark.full
def test_a_begun_end_of_a_vm_completes_after_virtshim_dies(told):
    facts = told("killed while it waits for the guest")
    assert (facts["state"], facts["code"], facts["message"]) == ("CONTAINER_EXITED", 137, "killed: no grace period")
    assert is_over(facts)


@pytest.mark.full
def test_the_next_container_of_the_pod_gets_the_same_devices_and_removing_the_pod_frees_them(told):
    facts = told("unplug: pod removed")
    assert {address: facts["drivers"][address] for address in AT_VFIO} == AT_VFIO


def test_a_function_is_reset_after_its_vm_and_the_reset_is_counted(told):
    facts = told("reset")
    assert facts["metrics"][f"virtshim_device_resets_total {FIRST} done"] >= 1
    assert facts["metrics"][f"virtshim_device_broken {FIRST}"] == 0
    assert facts["message"] == "killed: no grace period"


@pytest.mark.full
def test_a_refused_reset_is_reported_everywhere(told):
    facts = told("reset fails")
    assert facts["methods"].strip(), "it could be reset before"
    assert re.search(rf"; device {FIRST} could not be reset: .*/reset cannot be written", facts["message"])
    assert facts["metrics"][f"virtshim_device_resets_total {FIRST} failed"] == 1
    assert facts["metrics"][f"virtshim_device_broken {FIRST}"] == 1
    assert facts["others"][FIRST] == "Unhealthy"
    assert facts["others"][hardware.VFS[1]] == "Healthy"
    assert facts["check"] == "no: reset failed"


@pytest.mark.full
def test_no_vm_gets_a_function_that_could_not_be_reset(told):
    refused = told("broken device refused")
    assert (refused["of"], refused["code"], refused["left"]) == ("create", "FAILED_PRECONDITION", 0)
    assert f"PCI function {FIRST} could not be reset" in refused["message"]
    assert f"echo 1 > /sys/bus/pci/devices/{FIRST}/reset" in refused["message"]


@pytest.mark.full
def test_a_function_is_usable_again_after_a_successful_reset(told):
    facts = told("healed")
    assert facts["metrics"][f"virtshim_device_broken {FIRST}"] == 0
    assert facts["message"] == "killed: no grace period"
    assert facts["check"] == "yes"


@pytest.fixture
def faulty(told) -> str:
    """The device that reports errors."""
    before = told("errors: before")
    if before["missing"]:
        pytest.skip(f"NOT TO BE HAD HERE: the kernel's aer_inject: {before['missing']}")
    assert before["offered"] == {before["address"]: "Healthy"}
    return before["address"]


@pytest.mark.full
def test_nonfatal_errors_are_reported_and_counted_and_the_device_stays_healthy(told, faulty):
    facts = told("errors: nonfatal")
    assert facts["metrics"][f"virtshim_device_nonfatal_errors_total {faulty}"] >= 1
    assert facts["metrics"][f"virtshim_device_fatal_errors_total {faulty}"] == 0
    assert facts["offered"][faulty] == "Healthy"
    assert "fatal" not in facts["message"]


@pytest.mark.full
def test_a_fatal_error_is_reported_to_kubelet_and_in_the_containers_status(told, faulty):
    facts = told("errors: fatal")
    assert facts["metrics"][f"virtshim_device_fatal_errors_total {faulty}"] == 1
    assert f"device {faulty} has had 1 fatal PCI Express error" in facts["message"]
    assert any("fatal=1" in line and faulty in line for line in facts["log"])


@pytest.mark.full
def test_a_reset_repairs_a_device_and_the_last_status_keeps_the_error(told, faulty):
    facts = told("errors: reset")
    assert f"device {faulty} has had 1 fatal PCI Express error" in facts["message"]
    assert facts["metrics"][f"virtshim_device_resets_total {faulty} done"] == 1
