"""VMs keep running while the daemons restart."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess

import grpc
import pytest
from console import SerialConsole
from guest import boot, ping
from node import VIRTSHIM, free_cidr
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cli.node_dir import NodeDir, NodeOptions, write_node

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.faults]


@pytest.fixture(autouse=True)
def _node_runs_again(empty_node):
    """Restores a running, empty node for the next test."""
    node = empty_node
    yield
    if node.process is None or node.process.poll() is not None:
        node.up()
    with PodClient(node.socket) as cri:
        wait_until(lambda: answers(cri), 60, "the CRI socket serves")
        for pod in cri.pods():
            cri.remove_pod(pod.id)


def test_ctrl_c_leaves_vms_running_and_a_second_up_finds_them(node, image_url):
    with PodClient(node.socket) as cri:
        pod, container, log = boot(cri, node, f"{image_url}/guest.qcow2", "survivor")
        address = cri.pod_ip(pod)
    pids = node.qemu_pids()
    node.stop(signal.SIGINT)
    assert node.qemu_pids() == pids
    assert ping(address)
    console = SerialConsole(f"{node.directory}/run/vm/{container[:20]}/console.sock")
    console.type("echo said while aw''ay")
    node.up()
    with PodClient(node.socket) as cri:
        assert cri.status(container).state == pb.CONTAINER_RUNNING
        assert cri.pod_ip(pod) == address
        wait_for_log(log, "said while away", 60)
        assert sum("virtshim-guest: ready" in line for line in log_lines(log)) == 1, "nothing is doubled"

    node.stop()
    console.type("poweroff")
    # QEMU waits for libvirt to hear of the end (-no-shutdown), which comes back with the node.
    node.up()
    with PodClient(node.socket) as cri:
        wait_until(lambda: cri.status(container).state == pb.CONTAINER_EXITED, 60, "the container is EXITED")
        assert cri.status(container).exit_code == 0
        cri.remove_pod(pod)


@pytest.mark.parametrize("daemon", ["virtshim", "tapmanager"])
def test_a_killed_daemon_is_restarted_and_loses_nothing(node, image_url, daemon):
    with PodClient(node.socket) as cri:
        config = pod_config("steady", f"{node.directory}/logs/steady")
        pod = cri.run_pod(config)
        container = cri.create(pod, container_config(cri.pull(f"{image_url}/null.qcow2"), 64 << 20), config)
        cri.start(container)
        wait_for_log(cri.status(container).log_path, "null guest", 60)
    pids = node.qemu_pids()
    victim = node.daemons()[daemon]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: node.daemons().get(daemon, victim) != victim, 60, f"{daemon} runs again")
    with PodClient(node.socket) as cri:
        wait_until(lambda: answers(cri), 60, "the CRI socket serves")
        assert cri.status(container).state == pb.CONTAINER_RUNNING
        assert node.qemu_pids() == pids
        second = cri.run_pod(pod_config("later", f"{node.directory}/logs/later"))
        cri.remove_pod(second)
        cri.remove_pod(pod)


def answers(cri: PodClient) -> bool:
    try:
        status = cri.runtime.Status(pb.StatusRequest(), timeout=2).status
    except grpc.RpcError:
        return False
    return all(condition.status for condition in status.conditions)


def test_a_second_node_in_the_same_directory_is_refused(node):
    assert node.process is not None
    done = subprocess.run(
        [*VIRTSHIM, "up", "--dir", node.directory], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert str(node.process.pid) in done.stderr
    assert "Traceback" not in done.stderr


def test_down_removes_its_bridge_in_a_network_namespace_that_sys_does_not_show(node_root):
    node = NodeDir.at(f"{node_root}/o")
    write_node(node, NodeOptions(node.path, domain_type="qemu", pod_cidr=free_cidr()))
    down = shlex.join([*VIRTSHIM, "down", "--dir", node.path, "--all"])
    script = f"ip link add {node.bridge} type bridge && {down} && ! ip link show {node.bridge}"
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
