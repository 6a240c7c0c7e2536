"""A VM that boots from a block volume (volumeDevices with devicePath /) and has empty disks."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fakes.loop import loop_device, no_loop_devices
from guest import BOOT, READY
from node import Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.volumes, pytest.mark.skipif(**no_loop_devices())]

# A sector behind the end of the image.
SECTOR = "bs=512 count=1 conv=notrunc,fsync"
READ = "dd if=/dev/vda skip=200000 bs=512 count=1 2>/dev/null | tr -d '\\0'"
FILL = "echo hello | dd of=/dev/disks/data conv=notrunc,fsync 2>/dev/null"
WRITE = f"dd of=/dev/vda seek=200000 {SECTOR}"


@contextlib.contextmanager
def block_volume(directory: str, size: int) -> Iterator[Path]:
    file = Path(directory, f"volume-{uuid.uuid4().hex[:8]}")
    with file.open("wb") as made:
        made.truncate(size)
    with loop_device(file) as device:
        yield device
    file.unlink()


@pytest.fixture
def volume(node_root: str) -> Iterator[Path]:
    with block_volume(node_root, 128 << 20) as device:
        yield device


@pytest.fixture
def data(node_root: str) -> Iterator[Path]:
    with block_volume(node_root, 1 << 20) as device:
        yield device


class Pod:
    """A pod that refers to the volume by its own symlink, as kubelet does."""

    def __init__(self, cri: PodClient, node: Node, volume: Path, directory: Path, **annotations: str) -> None:
        name = f"on-volume-{uuid.uuid4().hex[:8]}"
        self.cri = cri
        self.link = directory / name
        self.link.symlink_to(volume)
        self.config = pod_config(name, f"{node.directory}/logs/{name}", annotations=annotations)
        self.pod = cri.run_pod(self.config)
        self.container = ""

    def create(self, image: str, data: Path | None = None) -> None:
        wanted = container_config(self.cri.pull(image))
        wanted.devices.add(host_path=str(self.link), container_path="/", permissions="mrw")
        if data is not None:
            wanted.devices.add(host_path=str(data), container_path="/dev/disks/data", permissions="mrw")
        self.container = self.cri.create(self.pod, wanted, self.config)

    def boot(self, image: str, data: Path | None = None) -> None:
        self.create(image, data)
        self.cri.start(self.container)
        wait_for_log(self.cri.status(self.container).log_path, READY, BOOT)

    def says(self, script: str) -> str:
        done = self.cri.exec_sync(self.container, "sh", "-c", script)
        assert done.exit_code == 0, (done.stdout + done.stderr).decode()
        return done.stdout.decode().strip()


def test_a_guest_boots_from_a_volume_and_the_next_pod_finds_its_data(
    cri: PodClient, node: Node, image_url: str, volume: Path, data: Path, tmp_path: Path
) -> None:
    first = Pod(cri, node, volume, tmp_path)
    first.boot(f"{image_url}/guest.qcow2", data)
    assert first.says("cat /sys/block/vda/size /sys/block/vda/serial").split() == [str((128 << 11) - 1), "root"]
    first.says(f"echo written by the first | {WRITE}")
    assert first.says(f"{FILL}; readlink -f /dev/disks/data") == "/dev/vdc"
    assert data.read_bytes()[:5] == b"hello"
    boots = "\n".join(log_lines(cri.status(first.container).log_path)).count(READY)
    with contextlib.suppress(grpc.RpcError):
        first.cri.exec_sync(first.container, "reboot", "-f", timeout=10)
    log = cri.status(first.container).log_path
    wait_until(lambda: "\n".join(log_lines(log)).count(READY) > boots, BOOT, "the guest has booted again")
    assert first.says("head -c 5 /dev/disks/data") == "hello", "the link is there again"
    rival = Pod(cri, node, volume, tmp_path)
    with pytest.raises(grpc.RpcError, match=f"container {first.container} .* has the volume {volume}"):
        rival.create(f"{image_url}/guest.qcow2")
    cri.stop(first.container, 0)
    cri.remove_pod(first.pod)

    second = Pod(cri, node, volume, tmp_path, **{"virtshim.io/disks": "scratch: {size: 64Mi, mountPath: /srv/scratch}"})
    second.boot(f"{image_url}/guest.qcow2")
    assert second.says(READ) == "written by the first"
    assert second.says("echo mine > /srv/scratch/file && sync; grep -c ' /srv/scratch ext4 rw' /proc/mounts") == "1"
    assert second.says("cat /sys/block/vdc/serial /sys/block/vdc/size").split() == [f"scratch{(64 << 11)}"]
    state = Path(node.directory, "state/containers", second.container)
    assert (state / "disk-scratch").exists()
    cri.stop(second.container, 0)
    wait_until(lambda: cri.status(second.container).state == pb.CONTAINER_EXITED, 60, "the second has ended")
    assert not (state / "disk-scratch").exists()

    other = Pod(cri, node, volume, tmp_path)
    with pytest.raises(grpc.RpcError, match=r"virtshim\.io/root-disk-on-image-change: replace"):
        other.create(f"{image_url}/null.qcow2")
    willing = Pod(cri, node, volume, tmp_path, **{"virtshim.io/root-disk-on-image-change": "replace"})
    willing.create(f"{image_url}/null.qcow2")
