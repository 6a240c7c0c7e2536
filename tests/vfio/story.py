"""Runs in the machine, from the first virtual function to `virtshim down`, and reports each step as a line of JSON.

    python tests/vfio/story.py REPORT CHAPTER,... [full]

A fake kubelet talks to `virtshim device-plugin` and to a node's CRI socket, all over real sockets. Nothing is judged here: tests
do that, outside. A step that fails reports `error` and ends its chapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
# Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
sys.path[:0] = [str(PROJECT / part) for part in ("", "deploy", "tests", "tests/e2e", "tests/vfio")]

import chapter_nic  # noqa: E402
import chapter_passthrough  # noqa: E402
import chapter_unplug  # noqa: E402
import chapter_usb_vdpa  # noqa: E402
import chapter_vhost  # noqa: E402
import hardware  # noqa: E402
from cluster import WAIT_LIMIT, Cluster  # noqa: E402
from fakes.kubelet import FakeKubelet  # noqa: E402
from fakes.pod_resources import FakePodResources, serving  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from leaks import Snapshot  # noqa: E402
from node import Node  # noqa: E402
from podclient import PodClient  # noqa: E402
from telling import Report, Stage  # noqa: E402

# Each chapter is in a file of its own, and the test file of that name judges it. Chapters run in this order. Each but
# the last leaves no pod behind.
CHAPTERS: dict[str, Callable[[Stage], None]] = {
    "nic": chapter_nic.tell,
    "usb_vdpa": chapter_usb_vdpa.tell,
    "unplug": chapter_unplug.tell,
    "passthrough": chapter_passthrough.tell,
}

# This chapter runs before there is a node.
_VHOST = "vhost"

_NODE = """
[devices]
pod_resources_socket = "/run/pod-resources.sock"
# Two emulations make a guest slow to answer.
unplug = %s
"""


def tell(report: Report, chapters: list[str], stack: ExitStack, *, full: bool) -> None:
    if _VHOST in chapters:
        with suppress(Exception):  # its step has reported it
            chapter_vhost.tell(report)
    chapters = [name for name in CHAPTERS if name in chapters]
    if not chapters:
        return
    with report.step("hardware") as facts:
        hardware.make_functions()
        for address in (*hardware.VFS[:2], hardware.EDU, hardware.SHARED_EDU, hardware.faulty()):
            hardware.bind(address, "vfio-pci")
        hardware.bind(hardware.VFS[2], "")
        facts["drivers"] = hardware.drivers()
        facts["groups"] = {address: hardware.group(address) for address in hardware.drivers()}
    node = Node("/var/tmp/n", "10.99.0.0/16", _NODE % chapter_unplug.SECONDS, patience=WAIT_LIMIT)
    if full:  # takes a minute, and the machine goes away in any case
        stack.callback(_down, node, Snapshot.take(), report)
    with report.step("up") as facts:
        try:
            node.up()
        finally:
            facts["log"] = node.log()
    client = stack.enter_context(PodClient(node.socket, timeout=WAIT_LIMIT))
    url = stack.enter_context(serve_directory(PROJECT / "build" / "vfio"))
    with report.step("image"):
        node.make_bridge()
        cluster = Cluster(client, f"{url.removeprefix('http://')}/unplugs.qcow2", node.directory)

    Path("/run/device-plugins").mkdir()
    kubelet = FakeKubelet(Path("/run/device-plugins"))
    kubelet.start()
    stack.callback(kubelet.stop)
    books = FakePodResources()
    stack.enter_context(serving(books, "/run/pod-resources.sock"))
    stage = Stage(report, node, client, cluster, kubelet, books, full)
    for name in chapters:
        told = False
        with suppress(Exception):  # its step has reported it
            CHAPTERS[name](stage)
            told = True
        if not told and name != chapters[-1]:
            for pod in client.pods():
                client.remove_pod(pod.id)


def _down(node: Node, before: Snapshot, report: Report) -> None:
    with report.step("down") as facts:
        facts["log"] = node.log()[-6000:]
        node.down()
        facts["left"] = before.settled(seconds=60)
        facts["drivers"] = hardware.drivers()


def main() -> None:
    report = Report(sys.argv[1])
    chapters = sys.argv[2].split(",")
    failed = False
    with suppress(Exception), ExitStack() as stack:
        failed = True
        tell(report, chapters, stack, full="full" in sys.argv[3:])
        failed = False
    with report.step("end") as facts:
        facts["told"] = not failed


if __name__ == "__main__":
    main()
