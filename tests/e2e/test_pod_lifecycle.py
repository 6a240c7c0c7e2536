"""A CRI client asks for a pod and a container and gets a booted virtual machine."""

from __future__ import annotations

import concurrent.futures
import os
import re
import time
from pathlib import Path

import grpc
import pytest
from guest import BOOT, READY, boot, console_of_pod, ping
from node import Node
from podclient import container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]


def test_a_pod_from_an_http_image_boots_answers_on_its_ip_and_logs_its_console(cri, node, image_url):
    pod, container, log = boot(cri, node, f"{image_url}/guest.qcow2")
    address = cri.pod_ip(pod)
    assert address.startswith(node.pod_cidr.removesuffix("0.0/16"))
    assert ping(address)
    ready = wait_for_log(log, READY, 60)
    assert "hostname=web" in ready
    assert f"ip={address}" in ready
    for line in Path(log).read_text(errors="replace").splitlines():
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}(Z|[+-]\d\d:\d\d) stdout [FP] ", line), line
    status = cri.status(container)
    assert status.state == pb.CONTAINER_RUNNING
    assert status.started_at > status.created_at


def test_qemu_runs_as_the_unprivileged_user_and_knows_no_fetch_key(cri, node, image_url):
    boot(cri, node, f"{image_url}/guest.qcow2")
    (pid,) = node.qemu_pids()
    uids = re.search(r"Uid:\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert uids is not None
    assert "0" not in uids.groups()
    assert b"FETCH_KEY" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_pod_from_a_registry_image_boots(cri, node, container_disk):
    pod, container, _log = boot(cri, node, container_disk)
    assert ping(cri.pod_ip(pod))
    status = cri.status(container)
    assert "@sha256:" in status.image_ref
    assert status.image_id == cri.pull(container_disk)


def test_two_pods_run_at_once_and_reach_each_other(cri, node, image_url):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(boot, cri, node, f"{image_url}/guest.qcow2", name) for name in ("one", "two")]
        (one, _, log_one), (two, _, _) = (future.result() for future in futures)
    first, second = cri.pod_ip(one), cri.pod_ip(two)
    assert first != second
    assert len(node.qemu_pids()) == 2
    # The guest's own shell, on the serial console, asks the other guest for its page.
    console = console_of_pod(cri, node, one)
    console.type(f"wget -q -O - http://{second}/ && ping -c 1 {second}")
    wait_for_log(log_one, "1 packets received", 60)
    wait_for_log(log_one, "two", 60)


def test_a_log_that_was_renamed_goes_on_in_a_new_file(cri, node, image_url):
    pod, container, log = boot(cri, node, f"{image_url}/guest.qcow2")
    rotated = f"{log}.20260101-000000"
    os.rename(log, rotated)
    request = pb.ReopenContainerLogRequest(container_id=container)
    cri.runtime.ReopenContainerLog(request, timeout=10)
    assert os.path.exists(log), "the new file must be there when ReopenContainerLog returns"
    before = Path(rotated).read_bytes()
    console_of_pod(cri, node, pod).type("echo after' the 'rotation")
    wait_for_log(log, "after the rotation", 60)
    assert Path(rotated).read_bytes() == before
    cri.stop(container, 0)
    os.rename(log, f"{log}.20260101-000010")
    with pytest.raises(grpc.RpcError) as refused:
        cri.runtime.ReopenContainerLog(request, timeout=10)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert not os.path.exists(log), "kubelet renames it back"


def test_cloud_init_sets_hostname_ssh_keys_user_data_variables_hosts_and_static_address(cri, node, image_url):
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGxvY2FsaG9zdGxvY2FsaG9zdGxvY2FsaG9zdDEy tester"
    annotations = {
        "VirtletSSHKeys": key,
        "VirtletCloudInitUserData": "write_files:\n- path: /tmp/hello\n  content: |\n    from user-data\n",
    }
    config = pod_config("seeded", f"{node.directory}/logs/seeded", annotations=annotations)
    hosts = Path(f"{node.directory}/kubelet/pods/{config.metadata.uid}/etc-hosts")
    hosts.parent.mkdir(parents=True)
    hosts.write_text("127.0.0.1\tlocalhost\n10.88.0.2\tseeded.db.ns.svc.cluster.local\tseeded\n10.1.2.3\tfoo.local\n")
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.mounts.add(container_path="/etc/hosts", host_path=str(hosts))
    wanted.envs.add(key="GREETING", value=b"hello, guest")
    pod = cri.run_pod(config)
    container = cri.create(pod, wanted, config)
    cri.start(container)
    log = cri.status(container).log_path
    wait_for_log(log, READY, BOOT)
    console = console_of_pod(cri, node, pod)
    console.type(
        "cat /tmp/hello /root/.ssh/authorized_keys /etc/cloud/environment /etc/hosts; hostname; "
        "ip addr show | grep inet; echo '<'done'>'"
    )
    wait_for_log(log, "<done>", 60)
    text = "\n".join(log_lines(log))
    assert "from user-data" in text
    assert key in text
    assert "GREETING=hello, guest" in text
    assert "foo.local" in text
    assert "127.0.1.1" not in text
    assert cri.pod_ip(pod) in text


def test_a_guest_without_network_config_gets_its_address_by_dhcp(cri, node, image_url):
    options = {"annotations": {"VirtletForceDHCPNetworkConfig": "true"}}
    pod, _container, log = boot(cri, node, f"{image_url}/guest.qcow2", "leased", **options)
    assert f"ip={cri.pod_ip(pod)}" in wait_for_log(log, READY, 60)
    assert ping(cri.pod_ip(pod))


def test_stop_shuts_the_guest_down_and_tells_how_it_ended(cri, node, image_url):
    _pod, container, _log = boot(cri, node, f"{image_url}/guest.qcow2")
    started = time.monotonic()
    cri.stop(container, 60)
    assert time.monotonic() - started < 30, "the guest listens to its power button"
    status = cri.status(container)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 143, "Error")
    assert status.finished_at > status.started_at
    assert not node.qemu_pids()
    cri.stop(container, 60)


def test_power_off_inside_the_guest_ends_the_container(cri, node, image_url):
    pod, container, _log = boot(cri, node, f"{image_url}/guest.qcow2")
    console_of_pod(cri, node, pod).type("poweroff")
    wait_until(lambda: cri.status(container).state == pb.CONTAINER_EXITED, 60, "the container is EXITED")
    assert cri.status(container).exit_code == 0


def test_memory_vcpus_and_queues_are_what_the_pod_asks_for(cri, node, image_url):
    pod, _container, log = boot(cri, node, f"{image_url}/guest.qcow2", "sized", annotations={"VirtletVCPUCount": "2"})
    console_of_pod(cri, node, pod).type("echo cpus=$(nproc) memory=$(awk '/MemTotal/ {print $2}' /proc/meminfo)")
    match = re.search(r"^cpus=2 memory=(\d+)", wait_for_log(log, "cpus=2", 60))
    assert match is not None
    assert 80_000 < int(match[1]) <= 128 << 10
    console_of_pod(cri, node, pod).type("echo queues: $(ls /sys/class/net/eth0/queues)")
    wait_for_log(log, "queues: rx-0 rx-1 tx-0 tx-1", 60)


def test_a_guest_that_ignores_shutdown_is_killed_after_the_grace_period(cri, node, image_url):
    config = pod_config("deaf", f"{node.directory}/logs/deaf")
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(cri.pull(f"{image_url}/null.qcow2"), 64 << 20), config)
    cri.start(container)
    wait_for_log(cri.status(container).log_path, "null guest", 60)
    cri.stop(container, 2)
    status = cri.status(container)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 137, "Error")
    assert "2 s" in status.message


def test_a_removed_image_keeps_the_vm_that_uses_it(cri, node, image_url):
    digest = cri.pull(f"{image_url}/null.qcow2")
    config = pod_config("keeper", f"{node.directory}/logs/keeper")
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(digest, 64 << 20), config)
    cri.images.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=digest)))
    cri.start(container)
    wait_for_log(cri.status(container).log_path, "null guest", 60)
    cri.remove_pod(pod)
    assert not os.path.exists(f"{node.directory}/state/images/sha256/{digest.removeprefix('sha256:')}")


def test_removal_leaves_only_the_log(cri, node, image_url):
    digest = cri.pull(f"{image_url}/null.qcow2")
    config = pod_config("brief", f"{node.directory}/logs/brief")
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(digest, 64 << 20), config)
    cri.start(container)
    log = cri.status(container).log_path
    cri.remove_pod(pod)
    assert os.path.exists(log), "logs are kubelet's to delete"
    for directory in ("state/containers", "run/vm", "state/tapmanager"):
        entries = [e for e in os.listdir(f"{node.directory}/{directory}") if len(e) >= 20]
        assert entries == [], directory
    leases = [e for e in os.listdir(f"{node.directory}/cni/leases/virtshim-{mark(node)}") if e[0].isdigit()]
    assert leases == []
    for call in (cri.pod_status, cri.status):
        with pytest.raises(grpc.RpcError) as gone:
            call(pod)
        assert gone.value.code() == grpc.StatusCode.NOT_FOUND


def mark(node: Node) -> str:
    (network,) = os.listdir(f"{node.directory}/cni/leases")
    return network.removeprefix("virtshim-")
