"""Measures lists of very many pods, and Status while very many calls wait."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
from figures import Figures, timed
from node import Node
from podclient import PodClient, wait_until

from criproto.runtime_v1 import api_pb2 as pb

PODS, BUSY = 500, 50
_CALLS = 200


@contextlib.contextmanager
def scale_node(tapmanager: str) -> Iterator[PodClient]:
    """A client of a node with `PODS` pods; the guests of `BUSY` of them ignore their power button."""
    with tempfile.TemporaryDirectory(prefix="virtshim-scale-") as directory:
        socket = f"{directory}/cri.sock"
        script = str(Path(__file__).with_name("scale_node.py"))
        command = [sys.executable, script, directory, socket, str(PODS), str(BUSY), tapmanager]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n", "the node with many pods did not start"
            with PodClient(socket) as client:
                yield client
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


def scale_round(node: Node, figures: Figures) -> None:
    with scale_node(f"{node.directory}/run/tapmanager.sock") as cri:
        assert (len(cri.pods()), len(cri.containers())) == (PODS, PODS)
        with without_our_own_pauses():
            for _ in range(2 * _CALLS):
                figures.add("list_500_p99_ms", timed(lambda: (cri.pods(), cri.containers())), "ms")
        for _ in range(_CALLS):
            figures.add("phase_status_idle_ms", timed(lambda: cri.runtime.Status(pb.StatusRequest())), "ms")
        with many_stops_waiting(cri):
            for _ in range(_CALLS):
                figures.add("status_busy_ms", timed(lambda: cri.runtime.Status(pb.StatusRequest())), "ms")


@contextlib.contextmanager
def without_our_own_pauses() -> Iterator[None]:
    """Disables this client's garbage collector, whose pauses are not to be measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def many_stops_waiting(cri: PodClient) -> Iterator[None]:
    waiting = [
        cri.runtime.StopContainer.future(pb.StopContainerRequest(container_id=one.id, timeout=600))
        for one in cri.containers()[-BUSY:]
    ]
    try:
        # The last call would be answered at once if its guest had ended: all must be waiting.
        threading.Event().wait(1.0)
        wait_until(lambda: not any(call.done() for call in waiting), 1, "all stops wait")
        yield
        assert not any(call.done() for call in waiting)
    finally:
        for call in waiting:
            with contextlib.suppress(grpc.RpcError):
                call.cancel()
