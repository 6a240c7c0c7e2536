"""The use cases behind RuntimeService, and the base of the servicer's parts."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import grpc

from virtshim.containers.checkpoint_container import CheckpointContainer
from virtshim.containers.create_container import CreateContainer
from virtshim.containers.exec import ExecCommand
from virtshim.containers.logs import ReopenContainerLog
from virtshim.containers.remove_container import RemoveContainer
from virtshim.containers.start_container import StartContainer
from virtshim.containers.stop_container import StopContainer
from virtshim.containers.update_resources import UpdateContainerResources, UpdateSandboxResources
from virtshim.cri.channel import SHOW_ADOPTED
from virtshim.metrics.usage import Usage
from virtshim.model.deadline import Deadline
from virtshim.model.layout import Layout
from virtshim.pods.events import EventBroadcaster
from virtshim.pods.node_status import NodeStatus
from virtshim.pods.remove_sandbox import RemoveSandbox
from virtshim.pods.run_sandbox import RunSandbox
from virtshim.pods.stop_sandbox import StopSandbox
from virtshim.store.ports import Records
from virtshim.streaming.ports import Streaming
from virtshim.system.clock import Clock

# For a caller without a deadline: kubelet's default (runtimeRequestTimeout), because no step may wait for ever.
_DEFAULT_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Services:
    """The use cases that the servicer's parts call."""

    records: Records
    clock: Clock
    layout: Layout
    node: NodeStatus
    run_sandbox: RunSandbox
    stop_sandbox: StopSandbox
    remove_sandbox: RemoveSandbox
    create_container: CreateContainer
    start_container: StartContainer
    stop_container: StopContainer
    checkpoint_container: CheckpointContainer
    remove_container: RemoveContainer
    exec_command: ExecCommand
    reopen_container_log: ReopenContainerLog
    usage: Usage
    streaming: Streaming
    events: EventBroadcaster
    update_container_resources: UpdateContainerResources
    update_sandbox_resources: UpdateSandboxResources


class ServicerPart:
    """A part of RuntimeService's calls; `RuntimeServicer` combines all parts."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def _deadline(self, context: grpc.ServicerContext) -> Deadline:
        return Deadline.after(self._services.clock.monotonic(), seconds_left(context))


def seconds_left(context: grpc.ServicerContext) -> float:
    return min(context.time_remaining(), _DEFAULT_SECONDS)  # about 9e18 without a deadline


def shows_adopted(context: grpc.ServicerContext) -> bool:
    """Whether the caller wants to see adopted sandboxes: virtshim's own tools do."""
    return SHOW_ADOPTED[0] in [tuple(pair) for pair in context.invocation_metadata()]


def set_when_cancelled(context: grpc.ServicerContext) -> threading.Event:
    """An event that is set when the call has ended for its client: cancelled, past its deadline, or disconnected."""
    cancelled = threading.Event()
    if not context.add_callback(cancelled.set):  # the call has ended already
        cancelled.set()
    return cancelled
