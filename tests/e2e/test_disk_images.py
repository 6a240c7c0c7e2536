"""A VM uses a disk.img in a volume with a file system, as on a PVC of KubeVirt or CDI."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from guest import BOOT, READY
from node import Node
from podclient import PodClient, container_config, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.volumes]

SIZE = 16 << 20
WRITE = "echo kept | dd of=/srv/data bs=512 count=1 conv=sync,notrunc,fsync 2>/dev/null"


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs below directories of root; its file belongs to another user."""
    place = tmp_path / "pods"
    place.mkdir(mode=0o700)
    claim = place / "claim"
    claim.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "virtshim-test", claim], check=True)
    with (claim / "disk.img").open("wb") as image:
        image.truncate(SIZE)
    os.chown(claim / "disk.img", 107, 107)
    os.chmod(claim / "disk.img", 0o600)
    yield claim
    if os.path.ismount(claim):
        subprocess.run(["umount", "-l", claim], check=True)


class Pod:
    def __init__(self, cri: PodClient, node: Node, volume: Path, *, readonly: bool = False) -> None:
        name = f"with-image-{uuid.uuid4().hex[:8]}"
        self.cri, self.volume, self.readonly = cri, volume, readonly
        annotations = {"virtshim.io/disk-images": "/srv/data"}
        self.config = pod_config(name, f"{node.directory}/logs/{name}", annotations=annotations)
        self.pod = cri.run_pod(self.config)
        self.container = ""

    def create(self, image: str) -> None:
        wanted = container_config(self.cri.pull(image))
        wanted.mounts.add(container_path="/srv/data", host_path=str(self.volume), readonly=self.readonly)
        self.container = self.cri.create(self.pod, wanted, self.config)

    def boot(self, image: str) -> None:
        self.create(image)
        self.cri.start(self.container)
        wait_for_log(self.cri.status(self.container).log_path, READY, BOOT)

    def says(self, script: str) -> str:
        done = self.cri.exec_sync(self.container, "sh", "-c", script)
        assert done.exit_code == 0, (done.stdout + done.stderr).decode()
        return done.stdout.decode().strip()

    def await_end(self) -> None:
        ended = pb.CONTAINER_EXITED
        wait_until(lambda: self.cri.status(self.container).state == ended, 60, "the container has ended")


def qemu_on(image: Path) -> int:
    """The process other than virtshim that has the file open."""
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or b"qemu-system" not in (entry / "cmdline").read_bytes():
                continue
            if str(image) in {os.readlink(one) for one in (entry / "fd").iterdir()}:
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"no QEMU has {image} open")


def test_a_guest_has_the_disk_image_and_any_end_of_the_vm_frees_the_volume(
    cri: PodClient, node: Node, image_url: str, volume: Path
) -> None:
    first, image = Pod(cri, node, volume), volume / "disk.img"
    first.boot(f"{image_url}/guest.qcow2")
    assert first.says("cat /sys/block/vdc/size /sys/block/vdc/serial").split() == [str(SIZE >> 9), "srv-data"]
    assert first.says(f"{WRITE}; readlink -f /srv/data") == "/dev/vdc"
    assert image.read_bytes()[:5] == b"kept\n"
    found = image.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777, found.st_size) == (107, 107, 0o600, SIZE)
    rival = Pod(cri, node, volume)
    with pytest.raises(
        grpc.RpcError, match=rf"config.mounts\[/srv/data\]: container {first.container} .* has the volume"
    ):
        rival.create(f"{image_url}/guest.qcow2")
    os.kill(qemu_on(image), signal.SIGKILL)
    first.await_end()
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)  # nobody holds it for writing

    second = Pod(cri, node, volume, readonly=True)
    second.boot(f"{image_url}/guest.qcow2")
    assert second.says("head -c 4 /srv/data; cat /sys/block/vdc/ro") == "kept1"
    cri.stop(second.container, 0)
    second.await_end()
    subprocess.run(["umount", volume], check=True)  # as kubelet does now; not -l
    for pod in (first, second, rival):
        cri.remove_pod(pod.pod)
