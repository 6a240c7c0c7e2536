"""A CRI client creates a pod and a container and gets a booted virtual machine with the requested properties."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from guest import ping
from podclient import wait_for_log
from running_vm import HOSTS, KEY, MEMORY, NAME, VCPUS, Vm

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]


def test_the_guest_boots_answers_on_its_ip_and_logs_its_console(vm: Vm) -> None:
    assert vm.address.startswith(vm.node.pod_cidr.removesuffix("0.0/16"))
    assert ping(vm.address)
    assert f"hostname={NAME}" in vm.ready
    assert f"ip={vm.address}" in vm.ready
    for line in Path(vm.log).read_bytes().decode(errors="replace").removesuffix("\n").split("\n"):
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}(Z|[+-]\d\d:\d\d) (stdout|stderr) [FP] ", line), line
    status = vm.cri.status(vm.container)
    assert status.state == pb.CONTAINER_RUNNING
    assert status.started_at > status.created_at


def test_qemu_runs_as_an_unprivileged_user_and_knows_no_fetch_key(vm: Vm) -> None:
    uids = re.search(r"Uid:\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", Path(f"/proc/{vm.qemu}/status").read_text())
    assert uids is not None
    assert "0" not in uids.groups()
    assert b"FETCH_KEY" not in Path(f"/proc/{vm.qemu}/environ").read_bytes()


def test_the_vm_has_the_memory_vcpus_and_queues_that_the_pod_requests(vm: Vm) -> None:
    assert vm.says("nproc") == str(VCPUS)
    total = int(vm.says("awk '/MemTotal/ {print $2}' /proc/meminfo")) << 10
    assert MEMORY * 5 // 8 < total <= MEMORY
    assert vm.says("ls /sys/class/net/eth0/queues").split() == ["rx-0", "rx-1", "tx-0", "tx-1"]


def test_cloud_init_has_set_hostname_keys_files_variables_hosts_and_address(vm: Vm) -> None:
    assert vm.says("hostname") == NAME
    assert vm.says("cat /tmp/hello") == "from user-data"
    assert KEY in vm.says("cat /root/.ssh/authorized_keys").splitlines()
    assert "GREETING=hello there" in vm.says("cat /etc/cloud/environment").splitlines()
    assert vm.says("cat /etc/hosts") == HOSTS.strip()
    assert f"inet {vm.address}/" in vm.says("ip address show dev eth0")


def test_a_renamed_log_continues_in_a_new_file(vm: Vm) -> None:
    log = vm.log
    rotated = f"{log}.20260101-000000"
    os.rename(log, rotated)
    vm.cri.runtime.ReopenContainerLog(pb.ReopenContainerLogRequest(container_id=vm.container), timeout=10)
    assert os.path.exists(log), "the new file must be there when ReopenContainerLog returns"
    before = Path(rotated).read_bytes()
    vm.says("echo after the rotation >/dev/ttyS0")
    wait_for_log(log, "after the rotation", 60)
    assert Path(rotated).read_bytes() == before
