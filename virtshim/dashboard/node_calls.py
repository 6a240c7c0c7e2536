"""The dashboard's calls to the node, through CRI and virtshim's Admin service, and the values that they return.

The calls block, so they run on threads. Each has a time limit. The dashboard can show any runtime that serves CRI; facts that
only virtshim reports are then missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from criproto.operator_v1 import operator_pb2
from criproto.runtime_v1 import api_pb2 as pb
from virtshim.annotations.parse import VNC_ANNOTATION
from virtshim.cri.channel import as_shim_errors, ask, open_channel
from virtshim.cri.client import NodeClient, VmSummary, is_made_by_run, stop_vm_of_run, vm_summary
from virtshim.cri.operator_client import OperatorClient
from virtshim.dashboard.readings import Counter, Reading
from virtshim.guest.operation import Action
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, ShimError, Unavailable, WrongState
from virtshim.streaming.ports import VNC_PORT
from virtshim.system.files import open_regular

_SECONDS: Final = 10.0
# The node may have to ask a guest agent, which takes time.
_DETAIL_SECONDS: Final = 20.0
# The most bytes of a console's earlier output that a page shows: a few screens.
_EARLIER: Final = 64 << 10
# The time that a stopped guest has to shut down, as with `virtshim stop`.
_GRACE: Final = 30
# A time before all actions.
_ALL: Final = 1.0
# Added to a time, so that the same action is not asked for again. Rounding a time to a float changes it by less.
_NEXT: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. `is_of_run`: `virtshim run` made it, not kubelet. `vms`: newest first."""

    id: str
    namespace: str
    name: str
    ready: bool
    created: float
    handler: str
    has_screen: bool
    is_of_run: bool
    vms: tuple[VmSummary, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """The node's state at one time. `conditions`: by name, the problem, or "" for none."""

    at: float
    version: str
    conditions: Mapping[str, str]
    facts: Mapping[str, Any]
    pods: Sequence[Pod]
    readings: dict[str, Reading]


class NodeCalls(NodeClient):
    """Calls raise ShimError."""

    def __init__(self, socket: str) -> None:
        self._channel, self._beside = open_channel(socket), open_channel(f"{os.path.dirname(socket)}/admin.sock")
        super().__init__(self._channel)
        self._operator = OperatorClient(self._beside)
        self._actions_after = _ALL

    def close(self) -> None:
        self._channel.close()
        self._beside.close()

    def look(self) -> Seen:
        version = ask(self._runtime.Version, pb.VersionRequest(), _SECONDS)
        status = ask(self._runtime.Status, pb.StatusRequest(verbose=True), _SECONDS)
        sandboxes = ask(self._runtime.ListPodSandbox, pb.ListPodSandboxRequest(), _SECONDS, adopted=True).items
        containers = ask(self._runtime.ListContainers, pb.ListContainersRequest(), _SECONDS).containers
        return Seen(
            time.time(),
            f"{version.runtime_name} {version.runtime_version}",
            {c.type: "" if c.status else c.message or c.reason or "not ready" for c in status.status.conditions},
            _object(status.info.get("config", "")),
            _pods(sandboxes, [self._with_trouble(vm_summary(one)) for one in containers]),
            self._readings(),
        )

    def _with_trouble(self, vm: VmSummary) -> VmSummary:
        """A VM whose status cannot be read is shown without its trouble."""
        try:
            return self.with_trouble(vm)
        except (Unavailable, DeadlineExceeded):
            raise
        except ShimError:
            return vm

    def _readings(self) -> dict[str, Reading]:
        """Empty if the runtime does not support these calls."""
        try:
            wanted = pb.ListPodSandboxStatsRequest()
            stats = ask(self._runtime.ListPodSandboxStats, wanted, _SECONDS, adopted=True).stats
            at = time.time_ns()
            asked = pb.ListPodSandboxMetricsRequest()
            metrics = ask(self._runtime.ListPodSandboxMetrics, asked, _SECONDS, adopted=True)
        except Unavailable:
            raise
        except ShimError:
            return {}
        return readings(stats, metrics.pod_metrics, at)

    def pod_status(self, pod: str) -> pb.PodSandboxStatusResponse:
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
        return ask(self._runtime.PodSandboxStatus, request, _SECONDS, adopted=True)

    def vm_status(self, vm: str) -> pb.ContainerStatusResponse:
        request = pb.ContainerStatusRequest(container_id=vm, verbose=True)
        return ask(self._runtime.ContainerStatus, request, _DETAIL_SECONDS)

    def start_up(self, pod: str) -> Sequence[operator_pb2.Phase]:
        """The phases of the pod's start, from the admin socket beside the CRI socket. Empty without such a socket."""
        try:
            found = self._operator.start_ups(pod)
        except ShimError:
            return ()
        return [phase for one in found if one.pod_sandbox_id == pod for phase in one.phases]

    def console(self, vm: str) -> tuple[str, bool]:
        """The URL of the VM's console, and whether the console takes input."""
        try:
            return self.console_url(vm, stdin=True), True
        except (WrongState, InvalidRequest):  # it has no stdin; if it has just ended, the next call raises
            return self.console_url(vm, stdin=False), False

    def earlier_output(self, vm: str) -> bytes:
        """The end of what the VM's console has printed, from the beginning of a line; b"" if it cannot be read."""
        try:
            container = self._operator.inspect(vm)["container"] or {}
            with open_regular(str(container.get("consoleLog", ""))) as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(max(0, size - _EARLIER))
                text = log.read(_EARLIER).lstrip(b"\0")  # virtshim has freed the older output
        except (ShimError, OSError, KeyError):
            return b""
        return text if len(text) == size else text.partition(b"\n")[2]

    def screen_url(self, pod: str) -> str:
        request = pb.PortForwardRequest(pod_sandbox_id=pod, port=[VNC_PORT])
        return ask(self._runtime.PortForward, request, _SECONDS).url

    def act(self, action: Action, vm: str) -> str:
        """Performs the action. Returns its result as text for people."""
        return self._operator.act(action, vm)[1]

    def stop(self, pod: str) -> str:
        """Does what `virtshim stop` does. Raises WrongState for a pod that kubelet made."""
        stop_vm_of_run(self, pod, _GRACE)
        return "its guest has shut down, or was ended"

    def screenshot(self, vm: str) -> bytes:
        return self._operator.screenshot(vm)

    def follow(
        self, tell: Callable[[str, float, str, str], None], started: Callable[[Callable[[], object]], None]
    ) -> None:
        """Calls `tell` with the kind, time, pod id and text of each event until the stream ends. First calls `started`
        with a function that ends the stream."""
        with as_shim_errors():
            stream = self._runtime.GetContainerEvents(pb.GetEventsRequest())
            started(stream.cancel)
            for one in stream:
                kind = pb.ContainerEventType.Name(one.container_event_type)
                kind = kind.removeprefix("CONTAINER_").removesuffix("_EVENT").lower()
                tell(kind, one.created_at / 1e9, one.pod_sandbox_status.id, _words(kind, one))

    def follow_actions(self, tell: Callable[[str, float, str, str], None]) -> None:
        """Like `follow`, for operators' actions. Begins with the actions that the node remembers and that earlier calls
        have not reported. Ends with the stream, or after `close`."""
        for one in self._operator.actions(self._actions_after):
            self._actions_after = one.at + _NEXT
            tell(one.action, one.at, one.pod_id, f"{one.action} of {one.pod} by an operator: {one.message}")


def readings(
    stats: Sequence[pb.PodSandboxStats], metrics: Sequence[pb.PodSandboxMetrics], at: int
) -> dict[str, Reading]:
    """The readings by pod. `at`: when the metrics were read."""
    measured = {one.pod_sandbox_id: one for one in metrics}
    return {one.attributes.id: _reading(one, measured.get(one.attributes.id), at) for one in stats}


def _reading(stats: pb.PodSandboxStats, metrics: pb.PodSandboxMetrics | None, at: int) -> Reading:
    linux = stats.linux
    cards = [linux.network.default_interface, *linux.network.interfaces] if linux.HasField("network") else []
    named = [one for container in metrics.container_metrics for one in container.metrics] if metrics else []
    return Reading(
        cpu=_counter(linux.cpu.timestamp, [linux.cpu.usage_core_nano_seconds] if _has_cpu(linux) else []),
        memory=linux.memory.working_set_bytes.value if linux.memory.HasField("working_set_bytes") else None,
        read=_counter(at, _values(named, "virtshim_vmi_storage_read_traffic_bytes_total")),
        written=_counter(at, _values(named, "virtshim_vmi_storage_write_traffic_bytes_total")),
        received=_counter(linux.network.timestamp, [card.rx_bytes for card in cards]),
        sent=_counter(linux.network.timestamp, [card.tx_bytes for card in cards]),
        memory_given=sum(one.value for one in _values(named, "virtshim_vmi_memory_domain_bytes")),
        vcpus=len(_values(named, "virtshim_vmi_vcpu_seconds_total")),
    )


def _has_cpu(linux: pb.LinuxPodSandboxStats) -> bool:
    return linux.HasField("cpu") and linux.cpu.HasField("usage_core_nano_seconds")


def _values(metrics: Sequence[pb.Metric], name: str) -> list[pb.UInt64Value]:
    return [one.value for one in metrics if one.name == name]


def _counter(at: int, values: Sequence[pb.UInt64Value]) -> Counter | None:
    return Counter(at, sum(one.value for one in values)) if values else None


def _pods(sandboxes: Sequence[pb.PodSandbox], vms: Sequence[VmSummary]) -> list[Pod]:
    """The pods, newest first."""
    of_pod: dict[str, list[VmSummary]] = {}
    for vm in sorted(vms, key=lambda one: one.created, reverse=True):
        of_pod.setdefault(vm.pod, []).append(vm)
    return [
        Pod(
            item.id,
            item.metadata.namespace,
            item.metadata.name,
            item.state == pb.SANDBOX_READY,
            item.created_at / 1e9,
            item.runtime_handler,
            item.annotations.get(VNC_ANNOTATION) == "true",
            is_made_by_run(item.labels),
            tuple(of_pod.get(item.id, ())),
        )
        for item in sorted(sandboxes, key=lambda one: one.created_at, reverse=True)
    ]


def _words(kind: str, change: pb.ContainerEventResponse) -> str:
    metadata = change.pod_sandbox_status.metadata
    pod = f"{metadata.namespace}/{metadata.name}"
    vm = next((one for one in change.containers_statuses if one.id == change.container_id), None)
    if vm is None:
        return f"pod {pod} {kind}"
    end = f" with code {vm.exit_code} ({vm.reason or 'no reason given'})" if kind == "stopped" else ""
    return f"VM {vm.metadata.name} of {pod} {kind}{end}" + (f": {vm.message[:300]}" if end and vm.message else "")


def _object(text: str) -> Mapping[str, Any]:
    """Parses a JSON object; empty if the text is not one."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
