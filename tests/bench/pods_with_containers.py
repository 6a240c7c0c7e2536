"""Measures RunPodSandbox through the proxy beside containerd's own, and a VM's start and network with passt beside the
same with a tap.

python -m tests.bench.pods_with_containers [ROUNDS]     these figures alone, on nodes of their own"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

PROJECT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
    of_tests = ("", "e2e", "bench", "faults", "integration/network")
    sys.path[:0] = [str(PROJECT), str(PROJECT / "deploy"), *(str(PROJECT / "tests" / one) for one in of_tests)]

import net_ways  # noqa: E402  needs the path above
from adopted_pods import HANDLER, AdoptedPod, others_pod  # noqa: E402
from both_runtimes import node_with_containerd  # noqa: E402
from figures import Figures, timed  # noqa: E402
from guest import BOOT, READY, console_of  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from net import KINDS, UNITS, speeds_of  # noqa: E402
from net_ways import Way  # noqa: E402
from node import Node  # noqa: E402
from others_namespace import PEER  # noqa: E402
from own_node import own_node  # noqa: E402
from podclient import PodClient, container_config, pod_config, wait_for_log  # noqa: E402

from criproto.runtime_v1 import api_pb2 as pb  # noqa: E402
from tapmanager.links import netns  # noqa: E402

T = TypeVar("T")
_A_ROUND = 5


def pods_with_containers_rounds(
    cri: PodClient, node: Node, null: str, guest: str, file: Path, rounds: int, figures: Figures
) -> None:
    """`null`, `guest`: the images' names for the node; `file`: where the guest's is."""
    sandbox_rounds(_A_ROUND * rounds, figures)
    start_rounds(cri, node, null, _A_ROUND * rounds, figures)
    passt_rounds(cri, node, guest, file, rounds, figures)


def sandbox_rounds(rounds: int, figures: Figures) -> None:
    """Adds `pod_sandbox_ratio`. Both calls make containerd run the same plugins."""
    with node_with_containerd() as both:
        both.node.make_bridge()
        for number in range(rounds + 1):
            taken = {}
            for name, cri in _alternating(number, ("proxy", both.proxy), ("containerd", both.containerd)):
                config = pod_config(f"{name}-{number}", f"{both.node.directory}/logs/{name}-{number}")
                made: list[str] = []
                taken[name] = timed(lambda cri=cri, config=config, made=made: made.append(cri.run_pod(config, HANDLER)))
                both.proxy.stop_pod(made[0])
                both.proxy.remove_pod(made[0])
            if number:  # the first round fills caches
                figures.add("phase_pod_sandbox_ms", taken["proxy"], "ms")
                figures.add("pod_sandbox_ratio", taken["proxy"] / taken["containerd"], "ratio")


def start_rounds(cri: PodClient, node: Node, image: str, rounds: int, figures: Figures) -> None:
    """Adds `passt_start_ratio`."""
    for number in range(rounds + 1):
        taken = {}
        ways: tuple[tuple[str, _Run], ...] = (("passt", _beside_containers), ("tap", _alone))
        for name, run in _alternating(number, *ways):
            with run(cri, node, image, f"{name}-{number}", 64 << 20) as (_, took, _):
                taken[name] = took
        if number:
            figures.add("phase_passt_start_ms", taken["passt"], "ms")
            figures.add("passt_start_ratio", taken["passt"] / taken["tap"], "ratio")


def passt_rounds(cri: PodClient, node: Node, guest: str, file: Path, rounds: int, figures: Figures) -> None:
    """Adds `passt_out_ratio`, `passt_in_ratio` and `passt_trips_ratio`: beside a bare QEMU with a tap without vhost-net."""
    with contextlib.ExitStack() as ending:
        ways = [ending.enter_context(_passt(cri, node, guest))]
        (vm,) = node.qemu_pids()
        ways.append(ending.enter_context(net_ways.bare_guest("tap", file, net_ways.TAP, 1, vm)))
        for _, speeds in speeds_of(ways, rounds, 1):
            for kind in KINDS:
                figures.add(f"phase_passt_{kind}", speeds["passt"][kind], UNITS[kind])
                figures.add(f"passt_{kind}_ratio", speeds["passt"][kind] / speeds["tap"][kind], "ratio")


# The container, the milliseconds of its start, and its pod if another runtime made that.
_Started = tuple[str, float, AdoptedPod | None]
_Run = Callable[[PodClient, Node, str, str, int], contextlib.AbstractContextManager[_Started]]


@contextlib.contextmanager
def _beside_containers(cri: PodClient, node: Node, image: str, name: str, memory: int) -> Iterator[_Started]:
    config = pod_config(name, f"{node.directory}/logs/{name}")
    with others_pod(f"{node.directory}/run/admin.sock", config) as pod:
        pod.adopt()
        try:
            yield *_started(cri, pod.id, image, memory, config), pod
        finally:
            cri.remove_pod(pod.id)


@contextlib.contextmanager
def _alone(cri: PodClient, node: Node, image: str, name: str, memory: int) -> Iterator[_Started]:
    config = pod_config(name, f"{node.directory}/logs/{name}")
    pod = cri.run_pod(config)
    try:
        yield *_started(cri, pod, image, memory, config), None
    finally:
        cri.remove_pod(pod)


def _started(cri: PodClient, pod: str, image: str, memory: int, config: pb.PodSandboxConfig) -> tuple[str, float]:
    wanted = container_config(cri.pull(image), memory)
    wanted.linux.resources.cpu_shares = 1024  # an ordinary process's weight, as the bare QEMU has
    made = cri.create(pod, wanted, config)
    return made, timed(lambda: cri.start(made))


@contextlib.contextmanager
def _passt(cri: PodClient, node: Node, guest: str) -> Iterator[Way]:
    """The guest's way through passt and the pod's interface to a socket outside the pod."""
    with _beside_containers(cri, node, guest, "net-passt", 128 << 20) as (made, _, pod):
        assert pod is not None
        wait_for_log(cri.status(made).log_path, READY, BOOT)
        outside = pod.namespace.outside
        yield Way("passt", PEER, console_of(node, made), lambda: netns.run_inside(outside, net_ways.listening))


def _alternating(number: int, *ways: T) -> Sequence[T]:
    """Which one goes first changes from round to round."""
    return ways if number % 2 else ways[::-1]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    figures, build = Figures(), PROJECT / "build"
    with own_node() as (node, _), serve_directory(build) as url, PodClient(node.socket) as cri:
        null, guest = (f"{url.removeprefix('http://')}/{name}.qcow2" for name in ("null", "guest"))
        pods_with_containers_rounds(cri, node, null, guest, build / "guest.qcow2", rounds, figures)
    figures.tell()


if __name__ == "__main__":
    main()
