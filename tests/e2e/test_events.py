"""A client of GetContainerEvents sees a real VM's life, and why each QEMU ended."""

from __future__ import annotations

import os
import queue
import signal
import threading
from pathlib import Path

import grpc
import pytest
from guest import boot, console_of_pod
from node import Node
from podclient import PodClient, container_config, pod_config

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

CREATED, STARTED = pb.CONTAINER_CREATED_EVENT, pb.CONTAINER_STARTED_EVENT
STOPPED, DELETED = pb.CONTAINER_STOPPED_EVENT, pb.CONTAINER_DELETED_EVENT


class Listener:
    """Collects all events from now on."""

    def __init__(self, cri: PodClient) -> None:
        self._told: queue.SimpleQueue[pb.ContainerEventResponse] = queue.SimpleQueue()
        self._stream = cri.runtime.GetContainerEvents(pb.GetEventsRequest())
        self._stream.initial_metadata()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            for event in self._stream:
                self._told.put(event)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.CANCELLED, error

    def next(self) -> pb.ContainerEventResponse:
        return self._told.get(timeout=60)

    def close(self) -> None:
        self._stream.cancel()
        self._reader.join()


@pytest.fixture
def listener(cri: PodClient):
    listener = Listener(cri)
    yield listener
    listener.close()


def test_events_of_a_vm_arrive_in_order_including_a_power_off_by_the_guest(cri, node: Node, image_url, listener):
    pod, container, _log = boot(cri, node, f"{image_url}/guest.qcow2")
    console_of_pod(cri, node, pod).type("poweroff")
    events = [listener.next() for _ in range(5)]
    cri.remove(container)
    cri.stop_pod(pod)
    cri.remove_pod(pod)
    events += [listener.next() for _ in range(3)]
    assert [(event.container_id, event.container_event_type) for event in events] == [
        *((pod, CREATED), (pod, STARTED)),
        *((container, CREATED), (container, STARTED), (container, STOPPED), (container, DELETED)),
        *((pod, STOPPED), (pod, DELETED)),
    ]
    stamps = [event.created_at for event in events]
    assert stamps == sorted(set(stamps))
    assert {event.pod_sandbox_status.metadata.name for event in events} == {"web"}
    assert events[1].pod_sandbox_status.network.ip
    (ended,) = events[4].containers_statuses
    assert (ended.state, ended.exit_code, ended.reason) == (pb.CONTAINER_EXITED, 0, "Completed")


def test_events_distinguish_a_killed_qemu_from_a_stop_without_grace_period(
    cri, node: Node, null_image, image_url, listener
):
    config = pod_config("killed", f"{node.directory}/logs/killed")
    pod = cri.run_pod(config)
    image = cri.pull(f"{image_url}/{null_image.name}")
    ends = []
    for attempt in range(4):
        container = cri.create(pod, container_config(image, 64 << 20, attempt=attempt), config)
        cri.start(container)
        (pid,) = node.qemu_pids()
        assert parent_of(pid) == node.process.pid, "up is not the parent of QEMU"
        if attempt % 2:
            cri.stop(container, 0)
        else:
            os.kill(pid, signal.SIGKILL)
        while (event := listener.next()).container_event_type != STOPPED:
            pass
        (ended,) = (one for one in event.containers_statuses if one.id == container)
        ends.append((ended.state, ended.exit_code != 0, ended.message == "killed: no grace period"))
    assert ends == [(pb.CONTAINER_EXITED, True, False), (pb.CONTAINER_EXITED, True, True)] * 2


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
