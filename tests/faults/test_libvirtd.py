"""When libvirtd dies, nothing is lost, no VM is affected, and virtshim reconnects by itself.

As in the kill matrix, a first call counts the daemon's calls to libvirt; `--all` takes each of these points."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from imageserver import serve_directory
from kill_points import one_in_turn
from leaks import Snapshot
from libvirtd_node import LibvirtdNode
from own_libvirtd import missing
from podclient import PodClient, wait_until
from test_kill_matrix import CALLS, FIRST, RESTORE, SAVE, WARM, kill_along
from work import working

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(3600)]

_CALLS = (
    "CreateContainer", "StartContainer", "StopContainer", "RemoveContainer", "StopPodSandbox", "RemovePodSandbox", SAVE, RESTORE,
)  # fmt: skip


@pytest.fixture(scope="module")
def node(guest_image: Path) -> Iterator[LibvirtdNode]:
    if why := missing():
        pytest.skip(why)
    before = Snapshot.take()
    directory = tempfile.mkdtemp(prefix="virtshim-libvirtd-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    try:
        with serve_directory(guest_image.parent) as url:
            node = LibvirtdNode(f"{directory}/n", url.removeprefix("http://"))
            try:
                node.up()
                node.start_bystander()
                yield node
            finally:
                node.end()
        left = before.settled(seconds=10)
        assert not left, "left behind: " + "; ".join(left)
    finally:
        shutil.rmtree(directory)


def runtime_ready(cri: PodClient) -> tuple[bool, str]:
    status = cri.runtime.Status(pb.StatusRequest(), timeout=2).status
    return next((one.status, one.message) for one in status.conditions if one.type == "RuntimeReady")


def test_without_libvirtd_status_reports_it_lists_answer_and_recovery_is_automatic(node: LibvirtdNode) -> None:
    it = node.bystander
    assert it is not None
    with node.client() as cri:
        assert runtime_ready(cri) == (True, "")
        node.kill("libvirtd")
        wait_until(lambda: not runtime_ready(cri)[0], 15, "RuntimeReady is false")
        assert "libvirt" in runtime_ready(cri)[1]
        assert [one.id for one in cri.pods()] == [it.pod]
        assert [one.id for one in cri.containers()] == [it.container]
        assert cri.status(it.container).state == pb.CONTAINER_RUNNING
        with pytest.raises(grpc.RpcError) as refused:
            cri.stop(it.container, 0)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        answer = cri.runtime.ExecSync(  # the guest's agent is no part of libvirt
            pb.ExecSyncRequest(container_id=it.container, cmd=["echo", "alive"], timeout=30), timeout=40
        )
        assert answer.stdout == b"alive\n"
        node.up()
        assert runtime_ready(cri) == (True, "")
        node.check_bystander(cri)


def test_a_vm_that_ends_without_libvirtd_is_exited_once_libvirtd_is_back(node: LibvirtdNode) -> None:
    with node.client() as cri, working(node, *CALLS["StopContainer"].prepare) as work:
        assert node.bystander is not None
        node.kill("libvirtd")
        for pid in node.qemu_pids() - node.bystander.pids:
            os.kill(pid, 9)
        node.up()
        wait_until(lambda: cri.status(work.container).state == pb.CONTAINER_EXITED, 30, "the container is EXITED")
        assert cri.status(work.container).exit_code != 0
        node.check_bystander(cri)


def test_virtshim_that_starts_before_libvirtd_waits_for_it(node: LibvirtdNode) -> None:
    node.kill("virtshim")
    node.kill("libvirtd")
    node.up()
    with node.client() as cri:
        node.check_bystander(cri)


@pytest.mark.parametrize("name", [*_CALLS, *one_in_turn((FIRST, WARM), "libvirtd")])
def test_the_node_recovers_from_a_kill_of_libvirtd_at_any_step(
    node: LibvirtdNode, name: str, every_point: bool
) -> None:
    kill_along(node, name, "libvirtd", every=every_point)
