"""SIGKILL of either node's virtshim at the steps of a move. Afterwards the VM runs on the new node with its memory, there was
never a second guest, and nothing is left on the first node."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from ears import TALK, Ears, console
from guest import BOOT, READY
from imageserver import serve_directory
from kill_points import strike
from leaks import Snapshot
from mortal_node import MortalNode
from peer_nodes import NAMES, PeerNodes
from podclient import PodClient, container_config, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.outlive, pytest.mark.timeout(3600)]

# Seconds for a move, whose nodes may have been started again.
LIMIT = 120.0
BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass
class Place:
    """The VM's pod on a node."""

    name: str
    node: MortalNode
    pod: str = ""
    container: str = ""
    config: pb.PodSandboxConfig | None = None
    attempt: int = 0


@dataclass
class Traveller:
    """One VM, whose guest runs all the time on one of two nodes."""

    at: Place
    other: Place
    image: str
    boot: str = ""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def board(self, place: Place, **annotations: str) -> None:
        """A pod of the VM, whose container is created."""
        logs = f"{place.node.directory}/logs/traveller-{next(self.numbers)}"
        place.config = pod_config("traveller", logs, {"virtshim.io/vm": "traveller", **annotations})
        place.attempt = 0
        with place.node.client() as cri:
            place.pod = cri.run_pod(place.config)
            self.create(cri, place)

    def create(self, cri: PodClient, place: Place) -> None:
        config = container_config(cri.pull(self.image), 128 << 20, attempt=place.attempt)
        place.container = cri.create(place.pod, config, place.config)

    def depart(self) -> None:
        self.board(self.at)
        with self.at.node.client(BOOT) as cri:
            cri.start(self.at.container)
            wait_for_log(cri.status(self.at.container).log_path, READY, BOOT)
            assert cri.exec_sync(self.at.container, "sh", "-c", TALK).exit_code == 0
            self.boot = self.boot_id(cri, self.at)

    def boot_id(self, cri: PodClient, place: Place) -> str:
        done = cri.exec_sync(place.container, "cat", BOOT_ID)
        return done.stdout.decode() if done.exit_code == 0 else ""

    def arrives(self) -> None:
        """What kubelet does until the VM runs: a container that has ended gets a next attempt."""
        wait_until(self.has_arrived_or_tries, LIMIT, "the guest arrives")

    def has_arrived_or_tries(self) -> bool:
        with contextlib.suppress(grpc.RpcError), self.other.node.client() as cri:
            state = cri.status(self.other.container).state
            if state == pb.CONTAINER_EXITED:
                self.other.attempt += 1
                self.create(cri, self.other)
            elif state == pb.CONTAINER_CREATED:
                cri.start(self.other.container)
            else:
                return self.boot_id(cri, self.other) == self.boot
        return False

    def move(self, victim: MortalNode, number: int, when: str) -> bool:
        """Whether the kill happened. Afterwards the VM is on the other node."""
        self.board(self.other, **{"virtshim.io/restore-from": self.at.name})
        consoles = [console(one.node.directory, one.container) for one in (self.at, self.other)]
        with Ears(consoles) as ears:
            with victim.armed("virtshim", number, when):
                with contextlib.suppress(grpc.RpcError), self.other.node.client() as cri:
                    cri.start(self.other.container)
                    wait_until(
                        lambda: victim.died("virtshim", 0.0) or self.has_arrived(cri), LIMIT, "the move or the kill"
                    )
                died = victim.died("virtshim", within=0.5)
            self.at.node.up()
            self.other.node.up()
            self.arrives()
        if self.other.attempt == 0:
            assert ears.gap_ms() >= 0, "two guests ran"
        self.leave()
        self.at, self.other = self.other, self.at
        return died

    def has_arrived(self, cri: PodClient) -> bool:
        try:
            return self.boot_id(cri, self.other) == self.boot
        except grpc.RpcError:
            return False

    def leave(self) -> None:
        """Deletes the first node's pod."""
        with self.at.node.client() as cri:
            wait_until(lambda: not self.at.node.qemu_pids(), 30, "the first node's QEMU has ended")
            cri.stop(self.at.container, 30)
            status = cri.status(self.at.container)
            assert (status.exit_code, status.reason) == (143, "Moved"), status
            cri.remove_pod(self.at.pod)
        vms = Path(self.at.node.directory, "state", "vms")
        files = [path.name for path in vms.rglob("*") if path.is_file()]
        assert files == ["vm.json"], "only the record stays, which says where the VM is"

    def steps(self, node: MortalNode) -> list[str]:
        with node.armed("virtshim", 0, "before"):
            self.board(self.other, **{"virtshim.io/restore-from": self.at.name})
            node.killers["virtshim"].arm(0)
            with self.other.node.client() as cri:
                cri.start(self.other.container)
                wait_until(lambda: self.has_arrived(cri), LIMIT, "the guest arrives")
            found = node.killers["virtshim"].steps()
        self.leave()
        self.at, self.other = self.other, self.at
        return found


@pytest.fixture
def traveller(guest_image: Path) -> Iterator[Traveller]:
    before = Snapshot.take()
    directory = tempfile.mkdtemp(prefix="vs-moves-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    try:
        with serve_directory(guest_image.parent) as url, contextlib.ExitStack() as ending:
            peers, places = PeerNodes(directory), []
            for name, uid in zip(NAMES, (1_900_000_000, 1_910_000_000), strict=True):
                settings = f"[libvirt]\nfirst_vm_uid = {uid}\n{peers.settings(name)}"
                node = MortalNode(f"{directory}/{name[0]}", url.removeprefix("http://"), settings=settings)
                ending.callback(node.end)
                node.up()
                places.append(Place(name, node))
                with node.client() as cri:  # the bridge comes with the first pod and stays
                    cri.remove_pod(cri.run_pod(pod_config("first", f"{directory}/{name[0]}/logs/first")))
            made = Traveller(*places, f"{url.removeprefix('http://')}/guest.qcow2")
            made.depart()
            yield made
            with made.at.node.client() as cri:
                cri.remove_pod(made.at.pod)
        left = before.settled(seconds=10)
        assert not left, "left behind: " + "; ".join(left)
    finally:
        shutil.rmtree(directory)


def test_a_move_survives_a_kill_of_either_daemon_at_any_step(traveller: Traveller, every_point: bool) -> None:
    for side in ("first", "second"):
        kill_along(traveller, side, every=every_point)


def kill_along(traveller: Traveller, side: str, *, every: bool) -> None:
    steps = traveller.steps(traveller.at.node if side == "first" else traveller.other.node)
    points = [(number, when) for number in range(1, len(steps) + 1) for when in ("before", "after")]

    def kill(point: tuple[int, str]) -> bool:
        victim = traveller.at.node if side == "first" else traveller.other.node
        print(f"MOVE {side}: killed {point[1]} step {point[0]} ({steps[point[0] - 1]})")
        return traveller.move(victim, *point)

    strike(f"move {side}", points, kill, every=every, at_least=lambda taken: taken // 2)
