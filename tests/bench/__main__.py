"""`make bench`: each promise measured beside its bare counterpart, in one run, round by round. Writes bench/results.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is imported: the embedded libvirt forks
# Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
sys.path[:0] = [str(PROJECT / "deploy"), *(str(PROJECT / "tests" / one) for one in ("", "e2e", "bench", "faults"))]

from bare import BareLibvirt  # noqa: E402
from boot import boot_round  # noqa: E402
from exec_true import exec_rounds  # noqa: E402
from exit_events import exit_round  # noqa: E402
from figures import Figures  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from many_pods import pods_rounds  # noqa: E402
from node import Node, free_cidr  # noqa: E402
from pod_start import one_round, vmwrapper_round  # noqa: E402
from podclient import PodClient  # noqa: E402
from proxy import proxy_rounds  # noqa: E402
from pull import pull_rounds  # noqa: E402
from recover import recover_rounds  # noqa: E402
from scale import scale_round  # noqa: E402
from shares import share_rounds  # noqa: E402

NULL = PROJECT / "build" / "null.qcow2"
GUEST = PROJECT / "build" / "guest.qcow2"


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
                    exit_round(cri, node, image, figures, number)
                    print(f"bench: round {number} of {options.rounds}", file=sys.stderr)
                pods_rounds(node, image, directory, options.rounds, figures)
                with tempfile.TemporaryDirectory(dir=directory) as big, serve_directory(Path(big)) as server:
                    pull_rounds(cri, Path(big), server.removeprefix("http://"), options.rounds, figures)
                scale_round(node, figures)
                recover_rounds(5, figures)
                proxy_rounds(40 * options.rounds, figures)
                guest = f"{url.removeprefix('http://')}/{GUEST.name}"
                for number in range(1, options.rounds + 1):
                    boot_round(cri, node, guest, GUEST, figures, number)
                    exec_rounds(cri, node, guest, 4, figures.add)
                share_rounds(cri, node, guest, GUEST, options.rounds, figures)
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
        spread = f"(p99 {figure['p99']}, min {figure['min']}, max {figure['max']}, n {figure['n']})"
        print(f"{key:24} {figure['median']:>10} {figure['unit']:6} {spread}")


if __name__ == "__main__":
    main()
