"""Odd volumes are refused by name, failing volumes give the guest an I/O error, and nothing is left."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from guest import BOOT
from node import Node
from podclient import PodClient, container_config, pod_config, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.volumes]

MANY = 200


class Odd:
    """Directories below the test's own directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mounted: list[Path] = []

    def __getitem__(self, name: str) -> Path:
        """A directory, created if missing."""
        path = self.directory / name
        path.mkdir(exist_ok=True)
        return path

    def tmpfs(self, name: str, options: str) -> Path:
        path = self[name]
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "virtshim-test", path], check=True)
        self._mounted.append(path)
        return path

    def end(self) -> None:
        for path in self._mounted:
            if os.path.ismount(path):
                subprocess.run(["umount", path], check=True)


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Odd]:
    made = Odd(tmp_path)
    yield made
    made.end()


@pytest.fixture
def pod(cri: PodClient, node: Node, odd: Odd) -> tuple[str, pb.PodSandboxConfig]:
    config = pod_config("odd", f"{node.directory}/logs/odd")
    return cri.run_pod(config), config


def says(cri: PodClient, container: str, script: str) -> str:
    """Standard output and standard error."""
    done = cri.exec_sync(container, "sh", "-c", f"exec 2>&1; {script}")
    return done.stdout.decode()


def test_odd_volumes_work_and_a_failing_volume_affects_no_other(
    cri: PodClient, image_url: str, odd: Odd, pod: tuple[str, pb.PodSandboxConfig]
) -> None:
    sandbox, config = pod
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    for number in range(MANY):
        directory = odd[f"a,b={number}\nc"]
        (directory / "number").write_text(f"{number}\n")
        wanted.mounts.add(container_path=f"/many/{number},\n'\"$x", host_path=str(directory), readonly=number % 2 == 1)
    inside = odd["inside"]
    (inside / "absolute").symlink_to(odd["outside"])
    (inside / "relative").symlink_to("../outside")
    (odd["outside"] / "secret").write_text("the node's")
    (odd.directory / "link").symlink_to(inside)
    small, lost = odd.tmpfs("small", "size=64k"), odd.tmpfs("lost", "size=64k")
    (lost / "text").write_text("still here")
    (odd["vanishes"] / "text").write_text("here")
    for name in ("link", "small", "vanishes", "lost"):
        wanted.mounts.add(container_path=f"/{name}", host_path=f"{odd.directory}/{name}")
    wanted.mounts.add(container_path="/fixed", host_path=str(odd.tmpfs("fixed", "size=64k,ro")))
    made = cri.create(sandbox, wanted, config)
    cri.start(made)
    numbers = [str(number) for number in range(MANY)]
    wait_until(lambda: says(cri, made, "cat /many/*/number | sort -n").split() == numbers, BOOT, "it has all volumes")
    assert says(cri, made, "cat /vanishes/text") == "here"
    assert len(cri.status(made).mounts) == MANY + 5
    # Symlinks are resolved in the guest.
    assert says(cri, made, "cat /link/absolute/secret").endswith("No such file or directory\n")
    assert says(cri, made, "cat /link/relative/secret").endswith("No such file or directory\n")
    assert says(cri, made, "cat /link/../outside/secret").endswith("No such file or directory\n")

    assert "No space left on device" in says(cri, made, "dd if=/dev/zero of=/small/all bs=4k")
    says(cri, made, "rm /small/all")
    # The guest's kernel tells virtiofsd about a deleted file with a delay, so the space is free a moment later.
    wait_until(lambda: says(cri, made, "echo fits > /small/all; cat /small/all") == "fits\n", 60, "there is room again")
    assert "Read-only file system" in says(cri, made, "echo > /fixed/x")
    (odd.directory / "vanishes" / "text").unlink()
    (odd.directory / "vanishes").rmdir()
    assert "nonexistent directory" in says(cri, made, "echo > /vanishes/other")
    # The guest reads from its cache for one more second.
    wait_until(lambda: "No such file" in says(cri, made, "cat /vanishes/text"), 60, "it is gone in the guest")
    subprocess.run(["umount", "-l", lost], check=True)
    assert says(cri, made, "cat /lost/text") == "still here"
    assert cri.status(made).state == pb.CONTAINER_RUNNING
    cri.stop(made, 0)
    for path in (small, odd.directory / "fixed"):
        subprocess.run(["umount", path], check=True)  # nobody holds them any more
    cri.remove_pod(sandbox)


def test_a_path_that_cannot_be_shared_is_refused_by_name(
    cri: PodClient, image_url: str, odd: Odd, pod: tuple[str, pb.PodSandboxConfig]
) -> None:
    sandbox, config = pod
    image = cri.pull(f"{image_url}/null.qcow2")
    os.mkfifo(odd.directory / "fifo")
    (odd.directory / "loop").symlink_to(odd.directory / "loop")

    def refused(host: str, at: str = "/data") -> str:
        wanted = container_config(image, 64 << 20)
        wanted.mounts.add(container_path=at, host_path=host)
        with pytest.raises(grpc.RpcError) as error:
            cri.create(sandbox, wanted, config)
        assert not cri.containers()
        return f"{error.value.code().name} {error.value.details()}"

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{odd.directory}/socket")
        for name, kind, words in (
            ("socket", "INVALID_ARGUMENT", "is a socket; only directories and regular files can be shared"),
            ("fifo", "INVALID_ARGUMENT", "is a FIFO"),
            ("loop", "UNAVAILABLE", "cannot be reached: Too many levels of symbolic links"),
            ("gone", "NOT_FOUND", "does not exist on the node; create it, or correct the volume"),
        ):
            said = refused(f"{odd.directory}/{name}")
            assert said.startswith(kind)
            assert f"{odd.directory}/{name} {words}" in said
    assert "/dev/zero is a device node" in refused("/dev/zero")
    for at in ("/", "/proc/1", "/dev", "//", "/srv/.."):
        assert "the guest's own" in refused(str(odd["plain"]), at), at
    assert "must be an absolute path" in refused(str(odd["plain"]), "data")
    assert "must be an absolute path" in refused("plain")


def test_a_volume_missing_at_the_start_is_named_and_the_next_attempt_has_it(
    cri: PodClient, node: Node, image_url: str, odd: Odd, pod: tuple[str, pb.PodSandboxConfig]
) -> None:
    sandbox, config = pod
    wanted = container_config(cri.pull(f"{image_url}/null.qcow2"), 64 << 20)
    wanted.mounts.add(container_path="/data", host_path=str(odd["late"]))
    made = cri.create(sandbox, wanted, config)
    (odd.directory / "late").rmdir()
    with pytest.raises(grpc.RpcError, match="late does not exist on the node"):
        cri.start(made)
    assert os.listdir(f"{node.directory}/run/shares") == []
    odd["late"]
    wanted.metadata.attempt = 1
    again = cri.create(sandbox, wanted, config)
    cri.start(again)
    assert cri.status(again).state == pb.CONTAINER_RUNNING
    cri.remove_pod(sandbox)
