"""With a full or read-only state directory, or a full log directory, errors say so, and nothing half-made is kept.
Removal still works, and everything continues when there is space."""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from mortal_node import MortalNode
from node import VIRTSHIM
from podclient import PodClient, log_lines, wait_until
from refusals import failing
from small_disk import SmallDisk, missing
from work import Work, working

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults]

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
SOON = 15.0


@dataclass(frozen=True)
class Place:
    node: MortalNode
    disk: SmallDisk


@pytest.fixture
def place(expendable: MortalNode, small_disk: SmallDisk | None) -> Iterator[Place]:
    """A directory on a disk that has space again afterwards."""
    if small_disk is None:
        pytest.skip(missing())
    yield Place(expendable, small_disk)
    with contextlib.suppress(FileNotFoundError):
        small_disk.free()


@pytest.fixture
def work(place: Place) -> Iterator[Work]:
    with working(place.node, Work.pull) as work:
        yield work


def statuses(cri: PodClient) -> dict[str, pb.RuntimeCondition]:
    status = cri.runtime.Status(pb.StatusRequest(), timeout=20).status
    return {condition.type: condition for condition in status.conditions}


def pull(cri: PodClient, image: str) -> None:
    cri.images.PullImage(pb.PullImageRequest(image=pb.ImageSpec(image=image)), timeout=60)


def test_a_pull_that_does_not_fit_is_refused_and_works_when_there_is_space(place: Place, work: Work) -> None:
    image = f"{place.node.image_url}/guest.qcow2"
    place.disk.fill(leaving=4 << 20)
    before = place.node.image_files()
    failing(lambda: pull(work.cri, image), FULL, "free some space")
    assert place.node.image_files() == before
    place.disk.free()
    pull(work.cri, image)
    assert len(place.node.image_files(work.cri)) == 2
    work.cri.images.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=image)), timeout=20)


class _Gate(http.server.BaseHTTPRequestHandler):
    """Sends the first half, then waits."""

    data = bytes(8 << 20) + os.urandom(8 << 20)
    begun = threading.Event()
    go_on = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.end_headers()
        half = len(self.data) // 2 + (1 << 20)
        self.wfile.write(self.data[:half])
        self.begun.set()
        self.go_on.wait(60)
        with contextlib.suppress(OSError):
            self.wfile.write(self.data[half:])

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


def test_a_disk_that_fills_up_during_a_pull_keeps_none_of_the_image(place: Place, work: Work) -> None:
    before = place.node.image_files()
    errors: list[grpc.RpcError] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Gate) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()

        def run() -> None:
            try:
                pull(work.cri, f"127.0.0.1:{server.server_address[1]}/half.qcow2")
            except grpc.RpcError as error:
                errors.append(error)

        pulling = threading.Thread(target=run)
        pulling.start()
        assert _Gate.begun.wait(SOON)
        place.disk.fill()
        _Gate.go_on.set()
        pulling.join(SOON)
        server.shutdown()
    assert [error.code() for error in errors] == [FULL], errors
    assert place.node.image_files() == before


def test_a_full_state_directory_is_reported_and_blocks_neither_lists_nor_removal(place: Place, work: Work) -> None:
    cri = work.cri
    for step in (work.run, work.create, work.start):
        step()
    empty, late = Work(place.node, cri, work.image), Work(place.node, cri, work.image)
    empty.run()
    before = place.node.left()
    place.disk.fill()
    failing(empty.create, FULL, "full")
    failing(late.run, FULL, "full")
    assert place.node.left() <= before, "half a container or network was kept"
    assert {pod.id for pod in cri.pods()} == {work.pod, empty.pod}
    assert {container.id for container in cri.containers()} == {work.container}
    assert cri.status(work.container).state == pb.CONTAINER_RUNNING
    assert statuses(cri)["RuntimeReady"].status, "kubelet would not remove pods any more, which is what makes room"
    work.stop()
    assert cri.status(work.container).state == pb.CONTAINER_EXITED
    work.remove_pod()
    empty.remove_pod()
    assert not cri.pods()
    place.disk.free()
    for step in (late.run, late.create, late.start):
        step()
    assert cri.status(late.container).state == pb.CONTAINER_RUNNING


def test_console_output_waits_for_space_in_the_log_directory(place: Place, work: Work, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", str(logs)], check=True)
    try:
        work.config.log_directory = f"{logs}/pod"
        (logs / "ballast").write_bytes(b"")
        work.run()
        work.create()
        with (logs / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        work.start()
        log = work.cri.status(work.container).log_path
        raw = Path(f"{place.node.settings.paths.state_dir}/containers/{work.container}/console.log")
        wait_until(lambda: b"null guest" in raw.read_bytes(), SOON, "the guest has spoken")
        assert not any("null guest" in line for line in log_lines(log))
        assert work.cri.status(work.container).state == pb.CONTAINER_RUNNING
        (logs / "ballast").unlink()
        wait_until(lambda: any("null guest" in line for line in log_lines(log)), SOON, "its words are in the log")
        work.remove_pod()
    finally:
        subprocess.run(["umount", str(logs)], check=True)


def test_a_read_only_state_directory_is_reported_and_loses_nothing(place: Place, work: Work) -> None:
    """This test is the last here, because the repair needs a restart of the daemons."""
    cri, node = work.cri, place.node
    for step in (work.run, work.create, work.start):
        step()
    empty, late = Work(node, cri, work.image), Work(node, cri, work.image)
    empty.run()
    images = node.image_files(cri)
    assert statuses(cri)["RuntimeReady"].status
    place.disk.break_()
    failing(late.run, grpc.StatusCode.INTERNAL, "state database")
    condition = statuses(cri)["RuntimeReady"]
    assert not condition.status
    assert "state database" in condition.message
    assert {pod.id for pod in cri.pods()} == {work.pod, empty.pod}
    assert [container.id for container in cri.containers()] == [work.container]
    assert cri.status(work.container).state == pb.CONTAINER_RUNNING
    failing(empty.create, grpc.StatusCode.INTERNAL, "state database")
    failing(lambda: pull(cri, f"{node.image_url}/guest.qcow2"), grpc.StatusCode.INTERNAL, "Read-only")
    failing(work.stop, grpc.StatusCode.INTERNAL, "state database")
    wait_until(lambda: not node.qemu_pids(), SOON, "the VM is off all the same")
    node.stop()
    done = subprocess.run(
        [*VIRTSHIM, "serve", "--config", f"{node.directory}/config.toml"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "read-only" in done.stderr.lower()
    assert "Traceback" not in done.stderr
    place.disk.repair()
    node.up()
    assert statuses(cri)["RuntimeReady"].status
    assert cri.status(work.container).state == pb.CONTAINER_EXITED
    assert node.image_files(cri) == images
    assert {pod.id for pod in cri.pods() if pod.state == pb.SANDBOX_READY} == {work.pod, empty.pod}
    for step in (work.remove_pod, empty.remove_pod, late.run, late.create, late.start):
        step()
    assert cri.status(late.container).state == pb.CONTAINER_RUNNING
