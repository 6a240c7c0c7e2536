"""A node of both kinds for trying things: `virtshim up --with-containerd`."""

import json
import os
import tempfile
from collections.abc import Iterator

import pytest
from bench.containerd import IMAGE, bring_image
from guest import answers
from node import Node, free_cidr
from podclient import PodClient, container_config, pod_config, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.proxy]

LIMIT = 60.0


@pytest.fixture
def fresh_node() -> Iterator[Node]:
    """One that begins with nothing."""
    with tempfile.TemporaryDirectory(prefix="virtshim-both-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o711)
        node = Node(f"{directory}/n", pod_cidr=free_cidr())
        try:
            node.up("--with-containerd")
            yield node
        finally:
            node.down()
        assert not os.path.exists(node.directory)


def test_containers_run_on_after_ctrl_c_and_go_with_the_node(fresh_node: Node) -> None:
    node, socket = fresh_node, f"{fresh_node.directory}/run/proxy.sock"
    with PodClient(socket) as cri, PodClient(f"{node.directory}/run/containerd.sock") as containerd:
        wait_until(lambda: answers(containerd), LIMIT, "containerd serves its CRI")
        told = containerd.runtime.Status(pb.StatusRequest(verbose=True), timeout=LIMIT).info["config"]
        bring_image(
            f"{node.directory}/run/containerd.sock", node.directory, containerd, json.loads(told)["sandboxImage"]
        )
        config = pod_config("container", f"{node.directory}/logs")
        pod = cri.run_pod(config)
        container = cri.create(pod, container_config(IMAGE), config)
        cri.start(container)
        vm_pod = cri.run_pod(pod_config("vm", f"{node.directory}/logs"), "virtshim")
        addresses = {cri.pod_ip(one) for one in (pod, vm_pod)}
        assert len(addresses) == 2
        assert all(one.startswith(node.pod_cidr.removesuffix("0.0/16")) for one in addresses)
        node.stop()
        node.up("--with-containerd")
        wait_until(lambda: answers(containerd) and answers(cri), LIMIT, "containerd serves again")
        assert {one.id for one in cri.pods()} == {pod, vm_pod}
        status = cri.status(container)
        assert (status.state, status.metadata.attempt) == (pb.CONTAINER_RUNNING, 0)
        assert cri.exec_sync(container, "/busybox", "echo", "still here").stdout == b"still here\n"
