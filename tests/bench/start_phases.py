"""Measures where a pod's start spends its time, by the daemons' logs and libvirt's debug log: `python -m
tests.bench.start_phases NAME`.

Writes into docs/dev/startup.json, as NAME, how long each phase took in the start in which it was quickest: what else runs on a
machine only ever adds. A further run of the same name keeps the smaller numbers. Draws all that are in there into
docs/dev/startup.svg."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is imported: the embedded libvirt forks
sys.path[:0] = [str(PROJECT / "deploy"), *(str(PROJECT / "tests" / one) for one in ("e2e", "bench", "faults"))]

from imageserver import serve_directory  # noqa: E402
from node import Node, free_cidr  # noqa: E402
from phases_plot import draw  # noqa: E402
from pod_start import cni_ms  # noqa: E402
from podclient import PodClient, container_config, pod_config  # noqa: E402

NUMBERS = PROJECT / "docs" / "dev" / "startup.json"
PLOT = PROJECT / "docs" / "dev" / "startup.svg"
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\+0000: ")
# libvirt's messages at the end of each of its phases, in order.
_MARKS = {
    "libvirt prepares": "Handshake complete, child running",
    "vmwrapper, QEMU until it answers": 'reply={"return": {}, "id": "libvirt-1"}',
    "libvirt asks QEMU": 'msg={"execute":"cont"',
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="of these numbers; without one, only the plot is made")
    parser.add_argument("--starts", type=int, default=20)
    options = parser.parse_args()
    known = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    if options.name:
        found = measured(options.starts)
        earlier = known.get(options.name, {})
        known[options.name] = {name: round(min(ms, earlier.get(name, ms)), 1) for name, ms in found.items()}
        NUMBERS.write_text(json.dumps(known, indent=1) + "\n")
    PLOT.write_text(draw(known))
    for name, phases in known.items():
        print(name, round(sum(phases.values())), phases)


def measured(starts: int) -> dict[str, float]:
    directory = tempfile.mkdtemp(prefix="virtshim-phases-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    debug = Path(directory, "libvirt.log")
    os.environ["LIBVIRT_LOG_FILTERS"] = "1:qemu.qemu_process 1:qemu.qemu_monitor"
    os.environ["LIBVIRT_LOG_OUTPUTS"] = f"1:file:{debug}"
    node = Node(f"{directory}/n", pod_cidr=free_cidr())
    image = PROJECT / "build" / "null.qcow2"
    try:
        node.up()
        try:
            with serve_directory(image.parent) as url, PodClient(node.socket) as cri:
                name = f"{url.removeprefix('http://')}/{image.name}"
                all_starts = [_one(cri, node, debug, name, number) for number in range(starts + 1)]
        finally:
            node.stop()
            node.down()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {phase: min(one[phase] for one in all_starts[1:]) for phase in all_starts[0]}  # the first fills caches


def _one(cri: PodClient, node: Node, debug: Path, image: str, number: int) -> dict[str, float]:
    config = pod_config(f"phases-{number}", f"{node.directory}/logs/{number}")
    at = [time.time()]
    pod = cri.run_pod(config)
    at.append(time.time())
    reference = cri.pull(image)
    wanted = container_config(reference, 64 << 20)
    at.append(time.time())
    vm = cri.create(pod, wanted, config)
    at.append(time.time())
    read = debug.stat().st_size
    started = time.time()
    cri.start(vm)
    ended = time.time()
    with debug.open(errors="replace") as file:
        file.seek(read)
        lines = file.readlines()
    cri.stop(vm, 0)
    cri.remove_pod(pod)
    cni = cni_ms(node, pod)
    phases = {"CNI plugins": cni, "RunPodSandbox": _ms(at[0], at[1]) - cni, "CreateContainer": _ms(at[2], at[3])}
    # libvirt's first message of this start comes a few lines later; the time before is virtshim's.
    before = _when(next(line for line in lines if "Beginning VM startup process" in line))
    phases["StartContainer: virtshim"] = _ms(started, before)
    for phase, mark in _MARKS.items():
        now = _when(next(line for line in lines if mark in line))
        phases[phase], before = _ms(before, now), now
    phases["the guest begins, records"] = _ms(before, ended)
    return phases


def _ms(began: float, ended: float) -> float:
    return (ended - began) * 1000


def _when(line: str) -> float:
    found = _STAMP.match(line)
    assert found is not None, line
    return dt.datetime.fromisoformat(f"{found[1]}+00:00").timestamp()


if __name__ == "__main__":
    main()
