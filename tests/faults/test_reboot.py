"""After a reboot, records, disks and images exist, and kubelet starts over. No process, namespace or run directory is
left, and the kernel has another boot id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path

import grpc
import pytest
from mortal_node import CNI_PLUGINS, MortalNode
from podclient import wait_until
from work import Work, working

from criproto.runtime_v1 import api_pb2 as pb
from tapmanager.cgroups.tree import VmCgroups, hierarchies

pytestmark = [pytest.mark.e2e, pytest.mark.faults]

SOON = 20.0


def reboot(node: MortalNode, sandboxes: list[str], boot: str) -> None:
    """Removes everything of this node that a power cut takes; another node may stand beside it."""
    for name in ("virtshim", "tapmanager", "shares"):
        node.kill(name)
    for pid in node.qemu_pids():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not node.qemu_pids() | node.virtiofsd_pids(), SOON, "no QEMU runs, and no virtiofsd")
    for sandbox in sandboxes:
        subprocess.run(["ip", "netns", "delete", f"virtshim-{sandbox[:20]}"], check=True)
    groups = VmCgroups(hierarchies())
    for written in Path(node.settings.paths.run_dir).glob("shares/*/group"):
        groups.remove(written.read_text())
    shutil.rmtree(node.settings.paths.run_dir)
    shutil.rmtree(f"{node.directory}/libvirt/run", ignore_errors=True)
    os.makedirs(node.settings.paths.run_dir, mode=0o711)
    node.environment["virtshim"]["VIRTSHIM_TEST_BOOT"] = boot
    node.up()


def leases(node: MortalNode) -> set[str]:
    return {item for item in node.left() if "/cni/leases/" in item and item.rpartition("/")[2][0].isdigit()}


def test_after_a_reboot_all_vms_have_ended_and_nothing_else_is_lost(expendable: MortalNode) -> None:
    node = expendable
    with working(node, Work.pull, Work.run, Work.create, Work.start) as work:
        cri = work.cri
        kept = Work(node, cri, work.image)
        kept.config.annotations["virtshim.io/root-disk"] = "pod"
        made = Work(node, cri, work.image)
        for step in (kept.run, kept.create, kept.start, made.run, made.create):
            step()
        disks = {path: path.stat().st_ino for path in pod_disks(node)}
        assert len(disks) == 1
        images = node.image_files(cri)
        incoming = Path(f"{node.settings.paths.state_dir}/images/incoming/half")
        incoming.write_bytes(b"half of an image")
        before = leases(node)
        assert len(before) == 3

        reboot(node, [pod.id for pod in cri.pods()], "another-boot")

        assert {pod.state for pod in cri.pods()} == {pb.SANDBOX_NOTREADY}
        assert len(cri.pods()) == 3
        for container in (work.container, kept.container):
            status = cri.status(container)
            assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 255, "Unknown")
            assert "node was restarted" in status.message
        with pytest.raises(grpc.RpcError) as caught:
            made.start()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION, "its network is gone"
        assert node.image_files(cri) == images
        assert not incoming.exists(), "a pull that was cut off is dropped; the repeated pull starts over"
        assert {path: path.stat().st_ino for path in pod_disks(node)} == disks
        assert leases(node) == before, "CNI still holds them until kubelet stops the pods"

        with recorded_dels(node) as record:
            for pod in (work, kept, made):
                pod.stop_pod()
        assert record.read_text().split().count("DEL") == 3
        assert '"ips"' in record.with_suffix(".stdin").read_text(), "DEL gets the result of ADD"
        assert not leases(node)

        kept.run()  # kubelet's next attempt
        kept.attempt += 1
        kept.create()
        kept.start()
        assert {path: path.stat().st_ino for path in pod_disks(node)} == disks, "the pod's disk is used again"
        wait_until(lambda: cri.status(kept.container).state == pb.CONTAINER_RUNNING, SOON, "it runs again")
        for pod in (made, kept):
            pod.remove_pod()
    assert not pod_disks(node)


def test_nothing_is_left_of_a_container_whose_first_row_a_power_cut_has_taken(expendable: MortalNode) -> None:
    """That row is not synced; disk, seed and definition may be on the disk without it."""
    node = expendable
    with working(node, Work.pull, Work.run) as work:
        before = node.left()
        work.create()
        made = node.left() - before
        assert [path for path in made if path.endswith(".qcow2")]
        assert [path for path in made if path.endswith(".xml")]
        node.kill("virtshim")
        with contextlib.closing(sqlite3.connect(node.settings.layout().database)) as database, database:
            assert database.execute("delete from containers where id = ?", (work.container,)).rowcount == 1
        reboot(node, [work.pod], "another-boot")
        assert work.cri.containers() == []
        assert not node.left() & made
        work.remove_pod()


def pod_disks(node: MortalNode) -> list[Path]:
    return sorted(Path(node.settings.layout().pod_disks).rglob("*.qcow2"))


class recorded_dels:  # noqa: N801  a context manager
    """The bridge plugin's calls and their input."""

    def __init__(self, node: MortalNode) -> None:
        self.file = Path(f"{node.directory}.dels")
        now, given = f"{self.file}.now", self.file.with_suffix(".stdin")
        note = f'cat > {now}; echo "$CNI_COMMAND" >> {self.file}; cat {now} >> {given}'
        script = f"{note}; exec {CNI_PLUGINS}/bridge < {now}"
        self._program = node.program(node.plugins, "bridge", script)

    def __enter__(self) -> Path:
        self._program.__enter__()
        return self.file

    def __exit__(self, *error: object) -> None:
        self._program.__exit__(*error)


def test_a_restart_of_the_daemons_does_not_count_as_a_reboot(mortal: MortalNode, work: Work) -> None:
    for step in (work.run, work.create, work.start):
        step()
    mortal.restart()
    assert work.cri.status(work.container).state == pb.CONTAINER_RUNNING
    assert work.is_ready()
