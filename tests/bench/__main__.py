"""`make bench` measures each promise and its bare counterpart in one run, round by round, and writes
bench/results.json. It measures the machine's own speed (`machine_*`) before and after.

make bench BENCH_ARGS="--rounds 3 --only starts,pods"
make bench BENCH_ARGS=--publish      also what docs/PROMISES.md shows: its numbers and its plots"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is imported: the embedded libvirt forks
# Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
OF_TESTS = ("", "e2e", "bench", "faults", "integration/network")
sys.path[:0] = [str(PROJECT / "deploy"), *(str(PROJECT / "tests" / one) for one in OF_TESTS)]

from beside_plot import draw as draw_beside  # noqa: E402
from figures import Figures  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from machine_speed import machine_round  # noqa: E402
from own_node import own_node  # noqa: E402
from podclient import PodClient  # noqa: E402
from promises_plot import draw as draw_promises  # noqa: E402
from sections import SECTIONS, Place  # noqa: E402

NULL = PROJECT / "build" / "null.qcow2"
GUEST = PROJECT / "build" / "guest.qcow2"
DOCS = PROJECT / "docs"
# An installation compiles the modules. Otherwise each start would, if PYTHONDONTWRITEBYTECODE is set.
PACKAGES = ("criproto", "tapmanager", "virtshim", "vmwrapper")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas; default: %(default)s")
    parser.add_argument("--output", default=str(PROJECT / "bench" / "results.json"))
    parser.add_argument("--publish", action="store_true", help="into docs/ as well")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"--only: no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if options.publish and set(chosen) != set(SECTIONS):
        parser.error("--publish: the promises are of one run, so of all sections; leave --only out")
    for package in PACKAGES:
        compileall.compile_dir(PROJECT / package, quiet=1)
    document = {
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "acceleration": "tcg",
        },
        "rounds": options.rounds,
        "figures": measured(chosen, options.rounds).document(),
    }
    write(Path(options.output), document)
    if options.publish:
        write(DOCS / "promises.json", document)
        (DOCS / "promises.svg").write_text(draw_promises(document["figures"]))
        (DOCS / "beside-containerd.svg").write_text(draw_beside(document["figures"]))
    for key, figure in document["figures"].items():
        spread = f"(p99 {figure['p99']}, min {figure['min']}, max {figure['max']}, n {figure['n']})"
        print(f"{key:32} {figure['median']:>10} {figure['unit']:6} {spread}")


def measured(chosen: Iterable[str], rounds: int) -> Figures:
    figures = Figures()
    with own_node() as (node, directory), serve_directory(NULL.parent) as url, PodClient(node.socket) as cri:
        place = Place(directory, node, cri, NULL, GUEST, url)
        machine_round(GUEST, directory, figures)
        for name in chosen:
            print(f"bench: {name}", file=sys.stderr)
            SECTIONS[name](place, rounds, figures)
        machine_round(GUEST, directory, figures)
    return figures


def write(path: Path, document: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
