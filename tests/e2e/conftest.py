"""A real node: `virtshim up` in a process of its own, real CNI, libvirt's embedded driver, QEMU by TCG."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest import answers
from imageserver import Registry, push_container_disk, registry, serve_directory
from leaks import Snapshot
from node import Node, free_cidr, state_key
from peer_nodes import PeerNodes
from podclient import PodClient, wait_until
from running_vm import RunningVm, Vm


@pytest.fixture(scope="package")
def node_root() -> Iterator[str]:
    """A directory below /var/tmp, which QEMU's unprivileged user can reach."""
    directory = tempfile.mkdtemp(prefix="virtshim-test-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="package")
def peer_nodes(node_root: str) -> PeerNodes:
    return PeerNodes(node_root)


@pytest.fixture(scope="package")
def node(node_root: str, peer_nodes: PeerNodes) -> Iterator[Node]:
    """One node for all tests here. After the last one, `virtshim down` must leave the machine as it was before the
    first."""
    before = Snapshot.take()
    # CNI plugins of our own, beside the distribution's.
    config = f'[tapmanager]\ncni_bin_dir = ["{node_root}/cni-bin", "/opt/cni/bin", "/usr/lib/cni"]\n'
    config += (
        f'[metrics]\naddress = "unix:{node_root}/n/run/metrics.sock"\nproxy_address = ""\n'  # several nodes a machine
    )
    config += "[cri]\npod_commands = 60\n"  # one test runs more at once than a pod should
    config += "[vm]\nagent_timeout = 900\n"  # a real distribution boots for minutes under emulation
    config += "[templates]\nmax_bytes = 1073741824\n"
    config += state_key(node_root) + peer_nodes.settings("here")
    if other := os.environ.get("VIRTSHIM_TEST_VIRTIOFSD"):
        config += f'[shares]\nvirtiofsd = "{other}"\n'
    node = Node(f"{node_root}/n", pod_cidr=free_cidr(), config=config)
    try:
        node.up()
        # The first pod creates the bridge, which stays until `down`: make it part of every test's snapshot.
        node.make_bridge()
        yield node
    finally:
        node.down()  # also ends a node that still runs
    left = before.settled(seconds=10)
    assert not left, "virtshim down left behind: " + "; ".join(left)
    assert not os.path.exists(node.directory)


@pytest.fixture(scope="package")
def running_vm(node: Node, image_url: str) -> Iterator[RunningVm]:
    running = RunningVm(node, image_url)
    yield running
    running.end()


@pytest.fixture
def vm(running_vm: RunningVm) -> Vm:
    """The shared VM, booted and answering, for tests that do not change it."""
    return running_vm.get()


@pytest.fixture
def empty_node(node: Node, running_vm: RunningVm) -> Node:
    """A node without pods, for tests that want the node for themselves."""
    running_vm.end()
    return node


@pytest.fixture
def cri(empty_node: Node) -> Iterator[PodClient]:
    """The CRI socket of a node without pods. Pods that the test leaves are removed."""
    node = empty_node
    with PodClient(node.socket) as client:
        yield client
        # A test may have failed while its daemon was starting again.
        wait_until(lambda: answers(client), 60, "the CRI socket serves")
        for pod in client.pods():
            client.remove_pod(pod.id)
        assert not client.containers()


@pytest.fixture
def other_node(node: Node, node_root: str, peer_nodes: PeerNodes) -> Iterator[tuple[Node, PodClient]]:
    """A second node of the same cluster on this machine, `there`; yields it with a client of it."""
    config = f'[tapmanager]\ncni_bin_dir = ["{node_root}/cni-bin", "/opt/cni/bin", "/usr/lib/cni"]\n'
    config += f'[metrics]\naddress = "unix:{node_root}/m/run/metrics.sock"\nproxy_address = ""\n'
    config += "[libvirt]\nfirst_vm_uid = 1900000000\n[vm]\nagent_timeout = 900\n"
    config += state_key(node_root) + peer_nodes.settings("there")
    other = Node(f"{node_root}/m", pod_cidr=free_cidr(), config=config)
    try:
        other.up()
        with PodClient(other.socket) as client:
            yield other, client
    finally:
        other.down()


@pytest.fixture(scope="package")
def image_url(guest_image: Path) -> Iterator[str]:
    """The URL without scheme, as an image name, of the demo guest and the null guest."""
    with serve_directory(guest_image.parent) as url:
        yield url.removeprefix("http://")


@pytest.fixture(scope="package")
def oci_registry() -> Iterator[Registry]:
    with registry() as running:
        yield running


@pytest.fixture(scope="package")
def container_disk(oci_registry: Registry, guest_image: Path) -> str:
    """The reference of the demo guest as a containerDisk image in a real registry."""
    push_container_disk(oci_registry.address, "vms/guest", guest_image, tag="v1")
    return f"{oci_registry.address}/vms/guest:v1"
