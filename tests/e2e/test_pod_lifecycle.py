"""A CRI client creates a pod and a container and gets a booted virtual machine."""

from __future__ import annotations

import concurrent.futures
import os

import grpc
import pytest
from guest import READY, boot, ping
from node import Node
from podclient import container_config, pod_config, wait_for_log

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]


def test_pods_of_two_kinds_of_images_run_at_once_reach_each_other_and_stop(cri, node, image_url, container_disk):
    """One guest has its address from cloud-init's data, the other by DHCP."""
    by_dhcp = {"annotations": {"VirtletForceDHCPNetworkConfig": "true"}}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(boot, cri, node, f"{image_url}/guest.qcow2", "one"),
            pool.submit(boot, cri, node, container_disk, "two", **by_dhcp),
        ]
        (one, first, _), (two, second, log) = (future.result() for future in futures)
    near, far = cri.pod_ip(one), cri.pod_ip(two)
    assert near != far
    assert all(address.startswith(node.pod_cidr.removesuffix("0.0/16")) for address in (near, far))
    assert ping(near)
    assert ping(far)
    assert f"ip={far}" in wait_for_log(log, READY, 60)
    assert len(node.qemu_pids()) == 2
    page = cri.exec_sync(first, "sh", "-c", f"wget -q -O - http://{far}/ && ping -c 1 {far}")
    assert page.exit_code == 0, page.stderr
    assert b"two" in page.stdout
    assert b"1 packets received" in page.stdout

    status = cri.status(second)
    assert "@sha256:" in status.image_ref
    assert status.image_id == cri.pull(container_disk)

    # Its power button ends the guest; nothing kills it.
    cri.stop(first, 60)
    status = cri.status(first)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 143, "Error")
    assert status.finished_at > status.started_at
    assert len(node.qemu_pids()) == 1
    cri.stop(first, 60)


def test_a_guest_that_ignores_shutdown_is_killed_after_the_grace_period(cri, node, image_url):
    config = pod_config("deaf", f"{node.directory}/logs/deaf")
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(cri.pull(f"{image_url}/null.qcow2"), 64 << 20), config)
    cri.start(container)
    log = cri.status(container).log_path
    wait_for_log(log, "null guest", 60)
    cri.stop(container, 2)
    status = cri.status(container)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 137, "Error")
    assert "2 s" in status.message
    os.rename(log, f"{log}.20260101-000010")
    with pytest.raises(grpc.RpcError) as refused:
        cri.runtime.ReopenContainerLog(pb.ReopenContainerLogRequest(container_id=container), timeout=10)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert not os.path.exists(log), "kubelet renames it back"


def test_removing_an_image_leaves_its_running_vm_alone(cri, node, image_url):
    digest = cri.pull(f"{image_url}/null.qcow2")
    config = pod_config("keeper", f"{node.directory}/logs/keeper")
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(digest, 64 << 20), config)
    cri.images.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=digest)))
    cri.start(container)
    wait_for_log(cri.status(container).log_path, "null guest", 60)
    cri.remove_pod(pod)
    assert not os.path.exists(f"{node.directory}/state/images/sha256/{digest.removeprefix('sha256:')}")


def test_removal_leaves_only_the_container_log(cri, node, image_url):
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
