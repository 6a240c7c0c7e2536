"""`make bench`: each promise measured beside its bare counterpart, in one run, round by round. Writes bench/results.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is imported: the embedded libvirt forks
sys.path[:0] = [str(PROJECT / "deploy"), str(PROJECT / "tests" / "e2e"), str(PROJECT / "tests" / "bench")]

from bare import BareLibvirt  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from node import Node, free_cidr  # noqa: E402
from podclient import PodClient, container_config, pod_config  # noqa: E402

NULL = PROJECT / "build" / "null.qcow2"


class Figures:
    """Samples by key; a ratio is taken pair by pair, because the machine's speed drifts."""

    def __init__(self) -> None:
        self._samples: dict[str, tuple[str, list[float]]] = {}

    def add(self, key: str, value: float, unit: str) -> None:
        self._samples.setdefault(key, (unit, []))[1].append(value)

    def document(self) -> dict[str, dict[str, object]]:
        return {
            key: {
                "median": round(statistics.median(values), 4),
                "min": round(min(values), 4),
                "max": round(max(values), 4),
                "n": len(values),
                "unit": unit,
            }
            for key, (unit, values) in self._samples.items()
        }


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.monotonic()
    call()
    return (time.monotonic() - started) * 1000


def one_round(cri: PodClient, node: Node, bare: BareLibvirt, image: str, figures: Figures, number: int) -> None:
    config = pod_config(f"bench-{number}", f"{node.directory}/logs/{number}")
    made: dict[str, str] = {}
    figures.add("phase_sandbox_ms", timed(lambda: made.update(pod=cri.run_pod(config))), "ms")
    figures.add("phase_pull_ms", timed(lambda: made.update(image=cri.pull(image))), "ms")
    wanted = container_config(made["image"], 64 << 20)
    figures.add("create_ms", timed(lambda: made.update(vm=cri.create(made["pod"], wanted, config))), "ms")
    bare.define_like(made["vm"])
    started = time.monotonic()
    # Which one goes first changes from round to round.
    if number % 2:
        plain = timed(bare.start)
        started = time.monotonic()
        ours = timed(lambda: cri.start(made["vm"]))
        first = first_byte_ms(node, made["vm"], started)
    else:
        ours = timed(lambda: cri.start(made["vm"]))
        first = first_byte_ms(node, made["vm"], started)
        plain = timed(bare.start)
    bare.remove()
    figures.add("phase_start_ms", ours, "ms")
    figures.add("phase_first_byte_ms", first, "ms")
    figures.add("bare_libvirt_start_ms", plain, "ms")
    figures.add("start_ratio", ours / plain, "ratio")
    figures.add("phase_stop_ms", timed(lambda: cri.stop(made["vm"], 0)), "ms")
    figures.add("phase_remove_ms", timed(lambda: cri.remove_pod(made["pod"])), "ms")
    figures.add("status_ms", timed(cri.pods), "ms")


def first_byte_ms(node: Node, container: str, started: float) -> float:
    """From the start request to the guest's first byte on the serial console."""
    log = f"{node.directory}/state/containers/{container}/console.log"
    while not os.path.exists(log) or not os.path.getsize(log):
        if time.monotonic() - started > 60:
            raise TimeoutError("the null guest wrote nothing")
        time.sleep(0.001)
    return (time.monotonic() - started) * 1000


def vmwrapper_round(node: Node, figures: Figures) -> None:
    """exec of vmwrapper to exec of the emulator, when libvirt only asks for capabilities."""
    environment = {"VIRTSHIM_EMULATOR": "/bin/true", "PATH": os.defpath}
    argv = [f"{node.directory}/bin/vmwrapper", "-version"]
    wrapped = timed(lambda: subprocess.run(argv, env=environment, check=True))
    plain = timed(lambda: subprocess.run(["/bin/true"], env=environment, check=True))
    figures.add("vmwrapper_ms", wrapped - plain, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", default=str(PROJECT / "bench" / "results.json"))
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="virtshim-bench-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    figures = Figures()
    try:
        node = Node(f"{directory}/n", pod_cidr=free_cidr())
        node.up()
        try:
            with (
                serve_directory(NULL.parent) as url,
                PodClient(node.socket) as cri,
                BareLibvirt(directory, node) as bare,
            ):
                image = f"{url.removeprefix('http://')}/{NULL.name}"
                one_round(cri, node, bare, image, Figures(), 0)  # caches: libvirt's QEMU capabilities, pages
                for number in range(1, options.rounds + 1):
                    one_round(cri, node, bare, image, figures, number)
                    vmwrapper_round(node, figures)
                    print(f"bench: round {number} of {options.rounds}", file=sys.stderr)
        finally:
            node.stop()
            node.down()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    machine = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "acceleration": "tcg",
    }
    document = {"machine": machine, "figures": figures.document()}
    Path(options.output).parent.mkdir(exist_ok=True)
    Path(options.output).write_text(json.dumps(document, indent=2) + "\n")
    for key, figure in document["figures"].items():
        spread = f"(min {figure['min']}, max {figure['max']}, n {figure['n']})"
        print(f"{key:24} {figure['median']:>10} {figure['unit']:6} {spread}")


if __name__ == "__main__":
    main()
