"""VMs that move to another node while they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guest import BOOT
from node import Node, free_cidr, state_key
from podclient import PodClient, log_lines, wait_for_log, wait_until
from test_outlive import COUNTER, Pods

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.outlive]

VM = {"virtshim.io/vm": "traveller"}


@pytest.fixture
def there(node, node_root, peer_nodes) -> Iterator[tuple[Node, PodClient]]:
    """A second node of the cluster on this machine, with a client of it."""
    config = f'[tapmanager]\ncni_bin_dir = ["{node_root}/cni-bin", "/opt/cni/bin", "/usr/lib/cni"]\n'
    config += f'[metrics]\naddress = "unix:{node_root}/m/run/metrics.sock"\nproxy_address = ""\n'
    config += "[libvirt]\nfirst_vm_uid = 1900000000\n[vm]\nagent_timeout = 900\n" + state_key(node_root)
    other = Node(f"{node_root}/m", pod_cidr=free_cidr(), config=config + peer_nodes.settings("there"))
    try:
        other.up()
        with PodClient(other.socket) as client:
            yield other, client
    finally:
        other.down()


def test_a_running_guest_moves_to_another_node_and_back(cri, node, image_url, there):
    other, client = there
    options = {
        "command": (
            "/bin/sh",
            "-c",
            f"{COUNTER.replace('while sleep 1', 'while sleep 1 && [ ! -e /tmp/end ]')}; exit 5",
        )
    }
    here = Pods(cri, node, f"{image_url}/guest.qcow2", "traveller", **options)
    here.next(VM)
    here.start()
    wait_for_log(here.log, "count-3", BOOT)
    boot = here.run("cat", "/proc/sys/kernel/random/boot_id")
    here.run("sh", "-c", "echo in-memory-only > /tmp/note; echo on-disk > /root/note; sync")

    away = Pods(client, other, f"{image_url}/guest.qcow2", "traveller", **options)
    away.next({**VM, "virtshim.io/restore-from": "here"})
    away.start()
    reached = int(log_lines(here.log)[-1].removeprefix("count-"))
    wait_for_log(away.log, f"count-{reached + 4}", 120)
    assert away.run("cat", "/proc/sys/kernel/random/boot_id") == boot
    assert away.run("cat", "/tmp/note", "/root/note") == "in-memory-only\non-disk\n"
    assert not node.qemu_pids()
    assert cri.status(here.container).state == pb.CONTAINER_RUNNING
    wait_until(other.qemu_pids, 1, "QEMU runs there")
    here.cri.stop(here.container, 30)
    status = cri.status(here.container)
    assert (status.exit_code, status.reason) == (143, "Moved"), status
    here.remove()
    away.run("touch", "/tmp/end")
    wait_until(lambda: client.status(away.container).state == pb.CONTAINER_EXITED, 60, "the command ends")
    assert client.status(away.container).exit_code == 5
    away.end()
