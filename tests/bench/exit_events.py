"""Measures the time from QEMU's end to the event that a client of GetContainerEvents reads."""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
import time

import grpc
from figures import Figures
from node import Node
from podclient import PodClient, container_config, pod_config

from criproto.runtime_v1 import api_pb2 as pb


class Listener:
    """Reads the events of a node and notes the time of each."""

    def __init__(self, cri: PodClient) -> None:
        self.told: queue.SimpleQueue[tuple[float, pb.ContainerEventResponse]] = queue.SimpleQueue()
        self._stream = cri.runtime.GetContainerEvents(pb.GetEventsRequest())
        self._stream.initial_metadata()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for event in self._stream:
                self.told.put((time.monotonic(), event))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.CANCELLED, error

    def stopped(self, container: str) -> float:
        """The time of the container's STOPPED event."""
        while True:
            at, event = self.told.get(timeout=30)
            if event.container_id == container and event.container_event_type == pb.CONTAINER_STOPPED_EVENT:
                return at

    def close(self) -> None:
        self._stream.cancel()


def exit_round(cri: PodClient, node: Node, image: str, figures: Figures, number: int) -> None:
    """Starts the container of one pod and kills QEMU, several times."""
    config = pod_config(f"exit-{number}", f"{node.directory}/logs/exit-{number}")
    pod = cri.run_pod(config)
    listener = Listener(cri)
    for attempt in range(5):
        container = cri.create(pod, container_config(cri.pull(image), 64 << 20, attempt=attempt), config)
        before = node.qemu_pids()
        cri.start(container)
        (pid,) = node.qemu_pids() - before
        descriptor = os.pidfd_open(pid)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        select.select([descriptor], [], [], 30)
        ended = time.monotonic()
        os.close(descriptor)
        told = listener.stopped(container)
        figures.add("exit_event_p99_ms", (told - ended) * 1000, "ms")
        figures.add("phase_kill_to_event_ms", (told - killed) * 1000, "ms")
    listener.close()
    cri.remove_pod(pod)
