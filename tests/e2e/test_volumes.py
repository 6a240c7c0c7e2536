"""A guest has directories and files of the node as volumes, and nothing of them is left afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from guest import BOOT, READY
from imageserver import Registry, push_files
from node import Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.volumes]


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[Path]:
    """A directory with a tmpfs below it, as kubelet creates for a volume: it can be unmounted once nobody holds it."""
    claim = tmp_path / "claim"
    claim.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "virtshim-test", claim], check=True)
    yield tmp_path
    if os.path.ismount(claim):
        subprocess.run(["umount", "-l", claim], check=True)


def daemons(node: Node) -> set[int]:
    """The processes that serve volumes of this node's VMs."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"virtiofsd" in command and f"{node.directory}/run/shares/".encode() in command:
                found.add(int(entry.name))
    return found


def run(cri: PodClient, container: str, script: str) -> str:
    done = cri.exec_sync(container, "sh", "-c", script)
    assert done.exit_code == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


def test_a_guest_has_its_pods_volumes(cri: PodClient, node: Node, image_url: str, volumes: Path) -> None:
    claim, config_file, shared = volumes / "claim", volumes / "my.cnf", volumes / "shared"
    config_file.write_text("[mysqld]\n")
    shared.mkdir()
    (shared / "seen").write_text("by the guest")
    os.symlink(shared, volumes / "link")
    (claim / "owned").write_text("")
    os.chown(claim / "owned", 1234, 5678)
    os.chmod(claim / "owned", 0o600)
    config = pod_config("volumes", f"{node.directory}/logs/volumes")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.command.extend(["sh", "-c", "cat '/srv/it,s here/seen' > /data/first; sync; while :; do sleep 1; done"])
    for path, host, readonly in (
        ("/data/sub", shared, False),
        ("/data", claim, False),
        ("/srv/it,s here", volumes / "link", True),
        ("/etc/my.cnf", config_file, True),
    ):
        wanted.mounts.add(container_path=path, host_path=str(host), readonly=readonly)
    made = cri.create(pod, wanted, config)
    cri.start(made)
    first = claim / "first"
    wait_until(lambda: first.exists() and first.read_text(), BOOT, "the command sees its volumes")

    assert first.read_text() == "by the guest"
    assert run(cri, made, "cat /etc/my.cnf; stat -c '%u %g %a' /data/owned") == "[mysqld]\n1234 5678 600\n"
    (shared / "later").write_text("from the node")
    wait_until(lambda: "from the node" in run(cri, made, "cat /data/sub/later 2>&1 || true"), 10, "the guest sees it")
    run(cri, made, "touch /data/mine && chown 42:43 /data/mine && chmod 2750 /data/mine")
    mine = (claim / "mine").stat()
    assert (mine.st_uid, mine.st_gid, mine.st_mode & 0o7777) == (42, 43, 0o2750)
    lifted = cri.exec_sync(made, "sh", "-c", "mount -o remount,rw '/srv/it,s here'; echo > '/srv/it,s here/x'")
    assert lifted.exit_code != 0
    assert not (shared / "x").exists()
    assert len({mount.container_path for mount in cri.status(made).mounts}) == 4
    assert daemons(node)

    victim = node.daemons()["virtshim"]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: node.daemons().get("virtshim", victim) != victim, 60, "virtshim runs again")
    wait_until(lambda: _running(cri, made), 60, "the container is known again")
    assert run(cri, made, "cat /data/first") == "by the guest"

    cri.stop(made, 0)
    assert cri.status(made).state == pb.CONTAINER_EXITED
    subprocess.run(["umount", claim], check=True)  # as kubelet does now; not -l
    assert daemons(node) == set()
    assert os.listdir(f"{node.directory}/run/shares") == []
    cri.remove_pod(pod)


def test_a_guest_reads_an_image_and_cannot_write_it(
    cri: PodClient, node: Node, image_url: str, oci_registry: Registry
) -> None:
    files = {"etc/motd": b"from the image", "bin/tool": b"#!/bin/sh\necho ran\n", "etc/deep/er": b"deep"}
    push_files(oci_registry.address, "volumes/files", files)
    config = pod_config("image-volume", f"{node.directory}/logs/image-volume")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.command.extend(["sh", "-c", "cat /image/etc/motd; while :; do sleep 1; done"])
    trees = Path(node.directory, "state/images/trees")
    before = set(os.listdir(trees))
    image = cri.pull(f"{oci_registry.address}/volumes/files")
    for path, below in (("/image", ""), ("/part", "etc/deep")):
        wanted.mounts.add(container_path=path, readonly=True, image_sub_path=below).image.image = image
    missing = container_config(image)
    with pytest.raises(grpc.RpcError, match="is not a VM image: it has no file below /disk"):
        cri.create(pod, missing, config)
    made = cri.create(pod, wanted, config)
    cri.remove_image(image)
    cri.start(made)
    wait_for_log(f"{config.log_directory}/{wanted.log_path}", "from the image", BOOT)

    assert run(cri, made, "/image/bin/tool; cat /part/er; stat -c '%u %a' /image/bin/tool") == "ran\ndeep0 755\n"
    written = "mount -o remount,rw /image; echo evil > /image/etc/motd; rm /image/etc/motd; touch /part/new"
    assert cri.exec_sync(made, "sh", "-c", written).exit_code != 0
    assert run(cri, made, "cat /image/etc/motd; ls /part") == "from the imageer\n"
    assert [mount.image.image for mount in cri.status(made).mounts] == [image, image]
    assert len(set(os.listdir(trees)) - before) == 1
    cri.stop(made, 0)
    cri.remove_pod(pod)
    assert set(os.listdir(trees)) <= before


def _running(cri: PodClient, container: str) -> bool:
    try:
        return cri.status(container).state == pb.CONTAINER_RUNNING
    except grpc.RpcError:  # it does not serve yet
        return False


@pytest.mark.full  # restarts: test_kubelet_volumes.py; daemons that die: tests/faults/test_virtiofsd_killed.py
def test_a_restarted_guest_has_its_volumes_and_a_dead_daemon_is_reported(
    cri: PodClient, node: Node, image_url: str, volumes: Path
) -> None:
    (volumes / "claim" / "text").write_text("here")
    config = pod_config("restarts", f"{node.directory}/logs/restarts")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.mounts.add(container_path="/data", host_path=str(volumes / "claim"))
    made = cri.create(pod, wanted, config)
    cri.start(made)
    log = cri.status(made).log_path
    wait_for_log(log, READY, BOOT)
    assert _reads(cri, made) == "here"

    cri.exec_sync(made, "sh", "-c", "(sleep 1; echo b >/proc/sysrq-trigger) >/dev/null 2>&1 &")
    wait_until(lambda: sum(READY in line for line in log_lines(log)) == 2, BOOT, "the guest is up again")
    wait_until(lambda: _reads(cri, made) == "here", 60, "it has its volume again")

    for pid in daemons(node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "virtiofsd" in cri.status(made).message, 60, "the container says so")
    cri.stop(made, 0)
    subprocess.run(["umount", volumes / "claim"], check=True)
    cri.remove_pod(pod)


def _reads(cri: PodClient, container: str) -> str:
    return cri.exec_sync(container, "cat", "/data/text").stdout.decode()


def test_an_empty_dir_in_memory_can_be_a_tmpfs_in_the_guest(
    cri: PodClient, node: Node, image_url: str, tmp_path: Path
) -> None:
    config = pod_config("memory", f"{node.directory}/logs/memory")
    config.hostname = "memory.team"
    config.annotations["virtshim.io/memory-volumes"] = "/dev/shm"
    empty_dir = tmp_path / "pods" / config.metadata.uid / "volumes" / "kubernetes.io~empty-dir" / "cache"
    empty_dir.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=0777", "virtshim-test", empty_dir], check=True)
    try:
        pod = cri.run_pod(config)
        wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
        wanted.mounts.add(container_path="/dev/shm", host_path=str(empty_dir))
        container = cri.create(pod, wanted, config)
        cri.start(container)
        wait_for_log(cri.status(container).log_path, READY, BOOT)
        mounted = run(cri, container, "grep ' /dev/shm ' /proc/mounts | tail -n 1").split()
        assert (mounted[0], mounted[2], "size=3072k" in mounted[3].split(",")) == ("virtshim-memory", "tmpfs", True)
        run(cri, container, "echo mine > /dev/shm/file && /etc/cloud/mount-volumes.sh && grep mine /dev/shm/file")
        assert run(cri, container, "grep -c virtshim-memory /proc/mounts; hostname").split() == ["1", "memory.team"]
        assert list(empty_dir.iterdir()) == []
        assert daemons(node) == set()
        cri.stop(container, 0)
        cri.remove_pod(pod)
    finally:
        subprocess.run(["umount", empty_dir], check=True)


def test_a_guest_that_cannot_mount_a_writable_volume_ends_with_the_reason_in_its_log(
    cri: PodClient, node: Node, image_url: str, volumes: Path
) -> None:
    """If a read-only volume cannot be mounted, the guest reports it and keeps running."""
    config = pod_config("unmounted", f"{node.directory}/logs/unmounted")
    pod = cri.run_pod(config)
    image = cri.pull(f"{image_url}/guest.qcow2")
    (volumes / "claim" / "text").write_text("here")

    def started(attempt: int, *mounts: tuple[str, bool]) -> tuple[str, str]:
        wanted = container_config(image)
        wanted.metadata.attempt = attempt
        wanted.log_path = f"{attempt}.log"
        for path, readonly in mounts:
            wanted.mounts.add(container_path=path, host_path=str(volumes / "claim"), readonly=readonly)
        made = cri.create(pod, wanted, config)
        cri.start(made)
        return made, cri.status(made).log_path

    # A file of the guest is where a directory of the path should be.
    made, log = started(0, ("/etc/passwd/data", False))
    wait_until(lambda: cri.status(made).state == pb.CONTAINER_EXITED, BOOT, "the container ends")
    status = cri.status(made)
    assert (status.exit_code, status.reason) == (128, "Error")
    assert status.message.startswith("the volumes cannot be mounted in the guest: ")
    assert "/etc/passwd/data: " in status.message
    (line,) = (one for one in Path(log).read_text().splitlines() if " virtshim: " in one)
    assert " stderr F virtshim: volumes_not_mounted: the volumes cannot be mounted in the guest: " in line
    cri.remove(made)

    made, log = started(1, ("/etc/passwd/data", True), ("/data", False))
    wait_for_log(log, "virtshim: volumes_not_mounted: ", BOOT)
    assert cri.status(made).state == pb.CONTAINER_RUNNING
    assert _reads(cri, made) == "here"
    assert "/etc/passwd/data" in cri.status(made).message
    cri.stop(made, 0)
    subprocess.run(["umount", volumes / "claim"], check=True)
    cri.remove_pod(pod)
