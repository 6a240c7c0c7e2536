"""A checkpoint holds the memory and disk of a real VM, and a pod's own disk and UUID survive restarts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import tarfile
import threading
import time
import uuid
from pathlib import Path

import grpc
import pytest
from guest import BOOT, READY, answers, boot, console_of
from podclient import container_config, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]


def checkpoint(cri, container: str, location: str, timeout: int = 100) -> None:
    request = pb.CheckpointContainerRequest(container_id=container, location=location, timeout=timeout)
    cri.runtime.CheckpointContainer(request, timeout=120)


def test_a_checkpoint_holds_memory_and_disk_and_the_guest_keeps_running(cri, node, image_url, tmp_path):
    pod, container, log = boot(cri, node, f"{image_url}/guest.qcow2", "saved")
    console = console_of(node, container)
    console.type("echo in-memory-only > /tmp/note; word=kept; dd if=/dev/vda bs=512 count=1 of=/dev/vda seek=9000 2>&1")
    (before,) = node.qemu_pids()
    archive = tmp_path / "one.tar"
    checkpoint(cri, container, str(archive))

    assert node.qemu_pids() == {before}
    console.type("echo still-$word-$(cat /tmp/note)")
    wait_for_log(log, "still-kept-in-memory-only", 60)
    status = cri.status(container)
    assert (status.state, status.message) == (pb.CONTAINER_RUNNING, "")
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["one.tar"]
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["checkpoint.json", "memory.save", "root.qcow2", "seed.iso"]
        manifest = json.load(tar.extractfile("checkpoint.json"))
        tar.extractall(tmp_path)
    assert manifest["container"]["id"] == container
    memory = (tmp_path / "memory.save").read_bytes()
    assert memory.startswith(b"LibvirtQemudSave")
    assert b"in-memory-only" in memory
    assert b"FETCH_KEY" not in memory[: 1 << 20], "what opens the pod's network stays on the node"
    checked = subprocess.run(
        ["qemu-img", "check", tmp_path / "root.qcow2"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr

    # The VM's disks are unchanged, without a chain of snapshots.
    disk = f"{node.directory}/state/containers/{container}/root.qcow2"
    mapped = Path(f"/proc/{before}/fd")
    opened = {os.readlink(fd) for fd in mapped.iterdir() if fd.is_symlink()}
    assert disk in opened
    files = sorted(os.listdir(os.path.dirname(disk)))
    assert files == ["console.log", "console.pos", "record.json", "root.qcow2", "seed.iso"]

    # A checkpoint that exceeds its time leaves nothing half-done, and the guest keeps running. The node's time begins when it
    # receives the call, so on a busy machine it may write the whole archive after the client has given up.
    late = tmp_path / "late.tar"
    os.kill(before, signal.SIGSTOP)  # a fast machine would be in time
    try:
        with pytest.raises(grpc.RpcError) as error:
            checkpoint_at_once(cri, container, str(late))
    finally:
        os.kill(before, signal.SIGCONT)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    console.type("echo and-still-$word")
    wait_for_log(log, "and-still-kept", 60)
    try:
        wait_until(lambda: not [name for name in os.listdir(tmp_path) if name.startswith(".")], 60, "all is cleaned up")
    except TimeoutError as exc:
        raise AssertionError(f"{exc}: {os.listdir(tmp_path)}\n{node.log()[-8000:]}") from exc
    if late.exists():
        with tarfile.open(late) as tar:
            assert tar.getnames() == ["checkpoint.json", "memory.save", "root.qcow2", "seed.iso"]
    cri.remove_pod(pod)


def test_file_systems_are_frozen_during_the_disk_copy_and_the_clock_is_right_afterwards(cri, node, image_url, tmp_path):
    pod, container, _log = boot(cri, node, f"{image_url}/guest.qcow2", "resting")
    # This guest needs its boot disk no more: it is a file system now.
    made = cri.exec_sync(
        container, "sh", "-c", "modprobe ext4; mke2fs /dev/vda && mount -t ext4 /dev/vda /mnt && date -s 2020-01-01"
    )
    assert made.exit_code == 0, made.stderr
    archive = tmp_path / "rest.tar"
    checkpoint(cri, container, str(archive))
    with tarfile.open(archive) as tar:
        assert json.load(tar.extractfile("checkpoint.json"))["frozenFileSystems"] == 1
    wrote = cri.exec_sync(container, "sh", "-c", "echo moves > /mnt/again && sync && cat /mnt/again", timeout=30)
    assert wrote.stdout == b"moves\n"
    wait_until(lambda: clock_is_right(cri, container), 60, "the clock is set")

    # If virtshim is killed while they are frozen, the next process thaws the guest.
    victim = node.daemons()["virtshim"]
    late = threading.Thread(target=checkpoint_that_dies, args=(cri, container, str(tmp_path / "late.tar")))
    late.start()
    wait_until(lambda: "guest.frozen" in node.log().rsplit("rest.tar", 1)[1], 60, "the file systems rest")
    os.kill(victim, signal.SIGKILL)
    late.join()
    wait_until(lambda: node.daemons().get("virtshim", victim) != victim, 60, "virtshim runs again")
    wait_until(lambda: "guest.thawed" in node.log().rsplit("guest.frozen", 1)[1], 60, "the guest is thawed")
    wait_until(lambda: answers(cri), 60, "the CRI socket serves")
    assert cri.exec_sync(container, "sh", "-c", "echo more > /mnt/more && sync", timeout=30).exit_code == 0
    cri.remove_pod(pod)


def clock_is_right(cri, container: str) -> bool:
    """Whether the guest's clock is right to within 5 s, however long the query takes."""
    asked = time.time()
    told = int(cri.exec_sync(container, "date", "+%s").stdout)
    return asked - 5 < told < time.time() + 5


def checkpoint_that_dies(cri, container: str, location: str) -> None:
    with contextlib.suppress(grpc.RpcError):
        checkpoint(cri, container, location)


def checkpoint_at_once(cri, container: str, location: str) -> None:
    """Takes a checkpoint with a client deadline that is too short for the memory."""
    request = pb.CheckpointContainerRequest(container_id=container, location=location)
    cri.runtime.CheckpointContainer(request, timeout=1)


@pytest.mark.full  # the disk that is the pod's: test_uefi.py has it too
def test_a_pods_root_disk_and_uuid_survive_restarts_and_new_sandboxes(cri, node, image_url):
    chosen = str(uuid.uuid4())
    annotations = {
        "virtshim.io/root-disk": "pod",
        "VirtletSystemUUID": chosen,
        "VirtletRootVolumeSize": "64Mi",
    }
    config = pod_config("keeper", f"{node.directory}/logs/keeper-{chosen[:8]}", annotations=annotations)
    digest = cri.pull(f"{image_url}/guest.qcow2")
    pod = cri.run_pod(config)
    sector = "bs=512 count=1 seek=100000 of=/dev/vda conv=notrunc,fsync"
    read = "dd if=/dev/vda bs=512 count=1 skip=100000 2>/dev/null | tr -d '\\0'"

    def start(pod: str, attempt: int) -> tuple[str, str]:
        container = cri.create(pod, container_config(digest, attempt=attempt), config)
        cri.start(container)
        log = cri.status(container).log_path
        wait_for_log(log, READY, BOOT)
        return container, log

    first, _log = start(pod, 0)
    console_of(node, first).type(f"echo written-by-the-first | dd {sector}")
    cri.stop(first, 0)
    second, log = start(pod, 1)
    console_of(node, second).type(f"echo found: $({read}); cat /sys/class/dmi/id/product_uuid")
    wait_for_log(log, "found: written-by-the-first", 60)
    wait_for_log(log, chosen, 60)
    cri.remove(first)  # late: its UUID is now the second's
    assert cri.status(second).state == pb.CONTAINER_RUNNING
    assert len(node.qemu_pids()) == 1

    cri.stop_pod(pod)
    config.metadata.attempt = 1
    newer = cri.run_pod(config)
    cri.remove_pod(pod)
    third, log = start(newer, 2)
    console_of(node, third).type(f"echo again: $({read})")
    wait_for_log(log, "again: written-by-the-first", 60)
    kept = f"{node.directory}/state/pods"
    assert len(os.listdir(kept)) == 1
    cri.remove_pod(newer)
    assert os.listdir(kept) == []
