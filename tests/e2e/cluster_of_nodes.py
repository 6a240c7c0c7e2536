"""Two real nodes form a cluster with the programs of VirtualMachine objects, a kubelet for each node, and a stand-in
for the API server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from fakes.control_planes import EVICTIONS, NODES, PODS, WEBHOOKS, Document, StandIn, until
from fakes.shop import Shop
from kubelet_of_a_node import KubeletOfANode, PodOfANode
from node import VIRTSHIM, Node
from peer_nodes import free_port
from podclient import PodClient, log_lines, wait_until

from criproto.runtime_v1 import api_pb2 as pb

BOOT_ID = "/proc/sys/kernel/random/boot_id"
# Seconds: a drain of four guests under emulation, and what kubectl waits between two requests.
LIMIT = 240.0
_ASKS_AGAIN = 5.0


class Program:
    """A program of the cluster. `says`: a word of its log when it serves."""

    def __init__(self, log: Path, says: str, *words: str) -> None:
        self._log, self._says, self._words = log, says, words
        self._process: subprocess.Popen[bytes] | None = None
        log.touch()

    def start(self) -> None:
        began = self._log.stat().st_size
        environment = os.environ | {"NO_COLOR": "1", "VIRTSHIM_IMAGES__TRANSLATIONS_DIR": f"{self._log}.images"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*VIRTSHIM, *self._words], stdout=log, stderr=log, env=environment)
        process = self._process

        def serves() -> bool:
            assert process.poll() is None, self._log.read_text()
            return self._says in self._log.read_text()[began:]

        wait_until(serves, 60, f"{self._words[0]} serves")

    def killed(self) -> None:
        """By SIGKILL, and started again, as kubelet does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            assert self._process.wait(60) == 0, self._log.read_text()


class Drain:
    """`kubectl drain`, which goes on until it is over or cancelled. Without kubectl, a loop that asks as kubectl does."""

    def __init__(self, shop: Shop, node: str, log: Path) -> None:
        self._shop, self._node, self._log = shop, node, log
        log.touch()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if shutil.which("kubectl"):
            config = shop.plane.admin.kubeconfig
            argv = ["kubectl", "--kubeconfig", config, "drain", node, "--ignore-daemonsets", f"--timeout={LIMIT:g}s"]
            with log.open("ab") as file:
                self._process = subprocess.Popen(argv, stdout=file, stderr=file)
        else:
            self._thread = threading.Thread(target=self._ask)
            self._thread.start()

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def is_done(self) -> bool:
        """Whether the node is empty. Raises AssertionError if the drain has given up."""
        if self._process is None:
            return self._thread is not None and not self._thread.is_alive()
        assert self._process.poll() in (None, 0), self.said
        return self._process.poll() == 0

    def cancel(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        elif self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)

    def _ask(self) -> None:
        cordon(self._shop, self._node)
        asked = {one["metadata"]["name"] for one in self._pods()}
        while left := [one["metadata"]["name"] for one in self._pods() if one["metadata"]["name"] in asked]:
            for name in left:
                code, told = self._shop.evict(name)
                if code == 429:
                    with self._log.open("a") as log:
                        log.write(f"{told}\n")
            if self._is_over.wait(_ASKS_AGAIN):
                return

    def _pods(self) -> list[Document]:
        return self._shop.plane.admin.all(PODS, query=f"?fieldSelector=spec.nodeName%3D{self._node}")


def cordon(shop: Shop, node: str, *, is_cordoned: bool = True) -> None:
    shop.plane.admin.do("PATCH", f"{NODES}/{node}", {"spec": {"unschedulable": is_cordoned}})


class ClusterOfNodes:
    def __init__(self, place: Path, nodes: dict[str, tuple[Node, PodClient]]) -> None:
        self._place = place
        self.plane = StandIn(place)
        self.nodes = {name: node for name, (node, _) in nodes.items()}
        admin, plane = self.plane.admin, self.plane
        self.kubelets = {
            name: KubeletOfANode(admin, name, cri, f"{node.directory}/logs") for name, (node, cri) in nodes.items()
        }
        port = free_port()
        plane.reach(port)
        config = plane.user("virtshim-controller").kubeconfig
        listen = f"127.0.0.1:{port}"
        words = "controller", "--kubeconfig", config, "--listen", listen
        self.controller = Program(place / "controller.log", "controller.serving", *words)
        self.agents = {name: self._agent(name, node) for name, node in self.nodes.items()}
        self._closing = threading.Event()
        self._scheduling = threading.Thread(target=self._schedule, daemon=True)
        self._scheduling.start()
        self.shop = Shop(plane, self)
        self._drains: list[Drain] = []

    def _agent(self, name: str, node: Node) -> Program:
        config = self.plane.user("virtshim-agent", name).kubeconfig
        words = "agent", "--node", name, "--kubeconfig", config, "--socket", node.socket
        return Program(self._place / f"agent-{name}.log", "agent.serving", *words)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    def start(self) -> None:
        for one in (self.controller, *self.agents.values()):
            one.start()
        self.until(self._trusts)

    def _trusts(self) -> bool:
        """Whether the API server knows the webhook's certificate."""
        (found,) = self.plane.admin.do("GET", f"{WEBHOOKS}/{EVICTIONS}")["webhooks"]
        return bool(found["clientConfig"].get("caBundle"))

    def _schedule(self) -> None:
        while not self._closing.wait(0.1):
            self.plane.act()

    def until(self, condition: Callable[[], Any], seconds: float = LIMIT) -> Any:
        return until(condition, self._look, seconds)

    def _look(self) -> None:
        for one in self.kubelets.values():
            for failure in one.failures:
                raise failure

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self.plane.close)
            for kubelet in self.kubelets.values():
                closing.callback(kubelet.close)
            closing.callback(self._scheduling.join)
            closing.callback(self._closing.set)
            for program in (self.controller, *self.agents.values()):
                closing.callback(program.stop)
            for drain in self._drains:
                drain.cancel()
            self.shop.close()
            self.until(lambda: not any(one.pods for one in self.kubelets.values()))

    # --- what people do

    def drain(self, node: str) -> Drain:
        self._drains.append(Drain(self.shop, node, self._place / f"drain-{len(self._drains)}.log"))
        return self._drains[-1]

    def uncordon(self, node: str) -> None:
        cordon(self.shop, node, is_cordoned=False)

    # --- what is in the guests

    def pods(self, vm: str) -> list[tuple[str, PodOfANode]]:
        """The VM's pods on all nodes, with the node's name."""
        found = [(name, pod) for name, one in self.kubelets.items() for pod in list(one.pods.values())]
        return [(name, pod) for name, pod in found if pod.name.rpartition("-")[0] == vm]

    def boots(self, vm: str) -> dict[str, str]:
        """The boot id of each guest of the VM that runs, by its node."""
        return {name: boot for name, pod in self.pods(vm) if (boot := _boot_of(pod))}

    def counts(self, vm: str) -> list[int]:
        """What its guest has counted, in the log of the pod that runs it."""
        home = self.shop.status(vm)["nodeName"]
        (pod,) = [pod for name, pod in self.pods(vm) if name == home]
        lines = log_lines(pod.cri.status(pod.container).log_path)
        return [int(line.removeprefix("count-")) for line in lines if line.startswith("count-")]

    def qemus(self) -> dict[str, int]:
        return {name: len(node.qemu_pids()) for name, node in self.nodes.items()}

    def kept(self) -> dict[str, list[str]]:
        """What the nodes keep of VMs."""
        return {name: sorted(os.listdir(f"{node.directory}/state/vms")) for name, node in self.nodes.items()}

    def events(self) -> list[Document]:
        return self.plane.admin.all("/api/v1/events", self.shop.name)


def _boot_of(pod: PodOfANode) -> str:
    try:
        if not pod.container or pod.cri.status(pod.container).state != pb.CONTAINER_RUNNING:
            return ""
        done = pod.cri.exec_sync(pod.container, "cat", BOOT_ID, timeout=20)
    except grpc.RpcError:
        return ""
    return str(done.stdout.decode().strip()) if done.exit_code == 0 else ""


@contextlib.contextmanager
def cluster_of(place: Path, nodes: dict[str, tuple[Node, PodClient]]) -> Iterator[ClusterOfNodes]:
    made = ClusterOfNodes(place, nodes)
    try:
        made.start()
        yield made
    finally:
        made.close()
