"""A VM that moves between two nodes whose parts die on order, and what kubelet does for its pods on both."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from ears import TALK, Ears, console
from guest import BOOT, READY
from mortal_node import MortalNode
from podclient import PodClient, container_config, pod_config, wait_for_log, wait_until
from test_reboot import reboot

from criproto.runtime_v1 import api_pb2 as pb

# Seconds for a move, whose nodes may have been started again.
LIMIT = 180.0
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# A part of the disk that nothing else uses: the small guest's files are in its memory.
SIZE = "64Mi"
WRITE = "dd of=/dev/vda bs=512 count=1 seek=100000 conv=sync,notrunc,fsync"
READ = "dd if=/dev/vda bs=512 count=1 skip=100000 2>/dev/null | tr -d '\\0'"
# The victim -> whose steps are counted, and whether the guest may lose its memory.
VICTIMS = {
    "virtshim": ("virtshim", False),
    "tapmanager": ("tapmanager", False),
    "libvirtd": ("libvirtd", False),
    "QEMU": ("virtshim", True),
    "all by a reboot": ("virtshim", True),
}


@dataclass
class Place:
    """The VM's pod on a node."""

    name: str
    node: MortalNode
    pod: str = ""
    container: str = ""
    config: pb.PodSandboxConfig | None = None
    attempt: int = 0

    def create(self, cri: PodClient, image: str) -> None:
        config = container_config(cri.pull(image), 128 << 20, attempt=self.attempt)
        self.container = cri.create(self.pod, config, self.config)

    def create_again(self, cri: PodClient, image: str) -> None:
        """The next attempt, in the next sandbox if the node was rebooted."""
        assert self.config is not None
        if cri.pod_status(self.pod).state != pb.SANDBOX_READY:
            cri.stop_pod(self.pod)
            self.config.metadata.attempt += 1
            self.pod = cri.run_pod(self.config)
        self.attempt += 1
        self.create(cri, image)

    def remove(self, cri: PodClient) -> None:
        for pod in cri.pods():
            cri.remove_pod(pod.id)


@dataclass(frozen=True)
class Strike:
    """Who dies on which side, before or after which step."""

    who: str
    side: str
    number: int
    when: str

    @property
    def daemon(self) -> str:
        return VICTIMS[self.who][0]

    @property
    def loses_memory(self) -> bool:
        return VICTIMS[self.who][1]


@dataclass
class Traveller:
    """One VM, whose guest runs all the time on one of two nodes. `boots`: the boot ids that it has had, the newest last."""

    at: Place
    other: Place
    image: str
    boots: list[str] = field(default_factory=list)
    trips: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def place(self, side: str) -> Place:
        return self.at if side == "first" else self.other

    def board(self, place: Place, **annotations: str) -> None:
        """A pod of the VM, whose container is created."""
        logs = f"{place.node.directory}/logs/traveller-{next(self.numbers)}"
        named = {"virtshim.io/vm": "traveller", "VirtletRootVolumeSize": SIZE}
        place.config = pod_config("traveller", logs, {**named, **annotations})
        place.attempt = 0
        with place.node.client() as cri:
            place.pod = cri.run_pod(place.config)
            place.create(cri, self.image)

    def depart(self) -> None:
        self.board(self.at)
        with self.at.node.client(BOOT) as cri:
            cri.start(self.at.container)
            self.greet(cri, self.at)

    def greet(self, cri: PodClient, place: Place) -> None:
        """Waits for a guest that boots, and makes it talk."""
        wait_for_log(cri.status(place.container).log_path, READY, BOOT)
        assert cri.exec_sync(place.container, "sh", "-c", TALK).exit_code == 0
        self.boots.append(self.boot_id(cri, place))

    def boot_id(self, cri: PodClient, place: Place) -> str:
        done = cri.exec_sync(place.container, "cat", BOOT_ID)
        return done.stdout.decode() if done.exit_code == 0 else ""

    def ask_for_it(self) -> None:
        self.board(self.other, **{"virtshim.io/restore-from": self.at.name})

    # --- the move

    def move(self, strike: Strike) -> bool:
        """Whether anything died. Afterwards the VM is on the other node, and nothing of it on the first one."""
        self.note()
        self.ask_for_it()
        first = [one.container for one in (self.at, self.other)]
        consoles = [console(one.node.directory, one.container) for one in (self.at, self.other)]
        with Ears(consoles) as ears:
            died = self.struck(strike)
            self.recover(strike, died=died)
            wait_until(lambda: self.has_settled(strike), LIMIT, "the guest runs on the other node")
        if [one.container for one in (self.at, self.other)] == first and not strike.loses_memory:
            assert ears.gap_ms() >= 0, "two guests ran"
        self.check_note()
        self.leave(strike)
        return died

    def note(self) -> None:
        """On the guest's disk."""
        self.trips += 1
        with self.at.node.client() as cri:
            write = f"echo {self.trips} | {WRITE}"
            assert cri.exec_sync(self.at.container, "sh", "-c", write).exit_code == 0

    def check_note(self) -> None:
        with self.other.node.client() as cri:
            done = cri.exec_sync(self.other.container, "sh", "-c", READ)
        assert done.stdout.decode() == f"{self.trips}\n", "an old disk"

    def struck(self, strike: Strike) -> bool:
        node, program = self.place(strike.side).node, "qemu-system" if strike.who == "QEMU" else ""
        with node.armed(strike.daemon, strike.number, strike.when, program):
            with contextlib.suppress(grpc.RpcError), self.other.node.client() as cri:
                cri.start(self.other.container)
                wait_until(lambda: self.died(strike, 0.0) or self.has_arrived(cri), LIMIT, "the move, or a death")
            return self.died(strike, within=0.5)

    def died(self, strike: Strike, within: float) -> bool:
        node = self.place(strike.side).node
        if strike.who == "QEMU":
            return bool(node.killers[strike.daemon].killed())
        return node.died(strike.daemon, within)

    def recover(self, strike: Strike, *, died: bool) -> None:
        if died and strike.who == "all by a reboot":
            place = self.place(strike.side)
            reboot(place.node, [place.pod], f"boot-{next(self.numbers)}")
        for place in (self.at, self.other):
            place.node.up()

    def has_arrived(self, cri: PodClient) -> bool:
        try:
            return self.boot_id(cri, self.other) == self.boots[-1]
        except grpc.RpcError:
            return False

    # --- what kubelet does until the VM runs: a container that has ended gets a next attempt

    def has_settled(self, strike: Strike) -> bool:
        with contextlib.suppress(grpc.RpcError, TimeoutError):
            if strike.loses_memory:
                self.start_again_on_the_first_node()
            return self.runs_on_the_other_node(strike)
        return False

    def start_again_on_the_first_node(self) -> None:
        """If its guest is lost, and the VM has not moved."""
        with contextlib.suppress(grpc.RpcError), self.at.node.client(BOOT) as cri:
            status = cri.status(self.at.container)
            if status.state == pb.CONTAINER_EXITED and status.reason != "Moved":
                self.at.create_again(cri, self.image)  # refused if the VM has moved
                cri.start(self.at.container)
                self.greet(cri, self.at)

    def runs_on_the_other_node(self, strike: Strike) -> bool:
        with self.other.node.client(BOOT) as cri:
            ready = cri.pod_status(self.other.pod).state == pb.SANDBOX_READY
            state = cri.status(self.other.container).state
            if state == pb.CONTAINER_EXITED or not ready:
                self.other.create_again(cri, self.image)
            elif state == pb.CONTAINER_CREATED:
                cri.start(self.other.container)
            elif (boot := self.boot_id(cri, self.other)) == self.boots[-1]:
                return True
            elif boot and strike.loses_memory:  # it was killed after it had moved, and boots from its disk
                self.greet(cri, self.other)
                return True
            else:
                assert not boot, "the guest has lost its memory"
        return False

    def leave(self, strike: Strike) -> None:
        """Deletes the first node's pod."""
        with self.at.node.client() as cri:
            wait_until(lambda: not self.at.node.qemu_pids(), 30, "the first node's QEMU has ended")
            cri.stop(self.at.container, 30)
            status = cri.status(self.at.container)
            # A QEMU that is killed in the moment of the decision has ended for both reasons.
            assert (status.exit_code, status.reason) == (143, "Moved") or strike.who == "QEMU", status
            self.at.remove(cri)
        vms = Path(self.at.node.directory, "state", "vms")

        def files() -> list[str]:
            return [path.name for path in vms.rglob("*") if path.is_file()]

        wait_until(lambda: files() == ["vm.json"], 30, "only the record stays, which says where the VM is")
        self.at, self.other = self.other, self.at

    def steps(self, daemons: tuple[str, ...]) -> dict[tuple[str, str], list[str]]:
        """Of a move that nobody disturbs: by daemon and side."""
        self.note()
        self.ask_for_it()
        with contextlib.ExitStack() as counting:
            for daemon, place in itertools.product(daemons, (self.at, self.other)):
                counting.enter_context(place.node.armed(daemon, 0, "before"))
            with self.other.node.client() as cri:
                cri.start(self.other.container)
                wait_until(lambda: self.has_arrived(cri), LIMIT, "the guest arrives")
            wait_until(lambda: not self.at.node.qemu_pids(), 30, "the first node's QEMU has ended")
            found = {
                (daemon, side): self.place(side).node.killers[daemon].steps()
                for daemon, side in itertools.product(daemons, ("first", "second"))
            }
        self.check_note()
        self.leave(Strike("virtshim", "first", 0, "before"))
        return found
