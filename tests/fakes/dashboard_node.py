"""A node as the dashboard sees one: CRI and Admin on a Unix socket, a streaming server, and any pods.

As a program (`python -m fakes.dashboard_node SOCKET PODS`) it serves a demonstration node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import grpc
from aiohttp import WSMsgType, web

from criproto.admin_v1 import admin_pb2, admin_pb2_grpc
from criproto.operator_v1 import operator_pb2, operator_pb2_grpc
from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc

_VNC = "virtshim.io/vnc"

if TYPE_CHECKING:
    # The type checker reports omitted methods as missing; gRPC answers UNIMPLEMENTED.
    class _Runtime: ...

    class _Admin: ...

    class _Operator: ...

else:
    _Runtime, _Admin = api_pb2_grpc.RuntimeServiceServicer, admin_pb2_grpc.AdminServicer
    _Operator = operator_pb2_grpc.OperatorServicer


@dataclass
class FakePod:
    """A pod with one VM, whose counters grow with each reading."""

    status: pb.PodSandboxStatus
    vm: pb.ContainerStatus | None
    startup: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    looks: int = 0
    load: float = 0.2
    memory: int = 512 << 20


class DashboardNode(_Runtime, _Admin, _Operator):
    """`with DashboardNode(socket) as node`. Its consoles print `node.greeting`; input is collected in `node.typed`. Operators'
    actions are collected in `node.acted`. They wait while `node.goes_on` is clear, and are refused if `node.refusal` is set."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self.pods: dict[str, FakePod] = {}
        self.conditions = {"RuntimeReady": "", "NetworkReady": ""}
        self.facts: dict[str, Any] = {"version": "0.1.0", "nodeId": "1f0e", "stateDir": "/var/lib/virtshim"}
        self.greeting = b"login: "
        self.takes_input = True
        self.typed = bytearray()
        self.flood: Callable[[], Iterator[bytes]] | None = None
        self.sizes: list[dict[str, int]] = []
        self.acted: list[str] = []
        self.refusal = ""
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.picture = b"\x89PNG"
        self._actions: list[operator_pb2.Action] = []
        self._listeners: list[queue.Queue[pb.ContainerEventResponse | None]] = []
        self._followers: list[queue.Queue[operator_pb2.Action | None]] = []
        self._server: grpc.Server | None = None
        self._streaming = _Streaming(self)
        self._numbers = itertools.count(1)

    # --- its life

    def __enter__(self) -> Self:
        self._streaming.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._streaming.stop()

    def start(self) -> None:
        for path in (self.socket, f"{os.path.dirname(self.socket)}/admin.sock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._pool = ThreadPoolExecutor(32)
        self._server = grpc.server(self._pool, options=[("grpc.max_send_message_length", 16 << 20)])
        api_pb2_grpc.add_RuntimeServiceServicer_to_server(cast("Any", self), self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(cast("Any", self), self._server)
        operator_pb2_grpc.add_OperatorServicer_to_server(cast("Any", self), self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.add_insecure_port(f"unix:{os.path.dirname(self.socket)}/admin.sock")
        self._server.start()

    def stop(self) -> None:
        """Stops as virtshim does: its pods keep running."""
        if self._server:
            for listener in list(self._listeners):
                listener.put(None)
            for follower in list(self._followers):
                follower.put(None)
            self._server.stop(0).wait()
            self._pool.shutdown()
            self._server = None

    # --- its pods

    def add(
        self, name: str, namespace: str = "default", *, vm: str = "vm", state: str = "RUNNING", **more: Any
    ) -> FakePod:
        """`more`: labels, annotations, image, ip, screen, created (seconds ago), startup, facts, message."""
        number = next(self._numbers)
        created = int((time.time() - more.get("created", 60.0)) * 1e9)
        annotations = dict(more.get("annotations", {}))
        if more.get("screen"):
            annotations[_VNC] = "true"
        status = pb.PodSandboxStatus(
            id=f"{number:064x}", state=pb.SANDBOX_READY, created_at=created, runtime_handler="virtshim",
            metadata=pb.PodSandboxMetadata(name=name, namespace=namespace, uid=f"uid-{number}"),
            network=pb.PodSandboxNetworkStatus(ip=more.get("ip", f"10.88.{number >> 8}.{number & 255}")),
            labels=more.get("labels", {}), annotations=annotations,
        )  # fmt: skip
        its_vm, vm_state = None, pb.ContainerState.Value(f"CONTAINER_{state}")
        if vm:
            its_vm = pb.ContainerStatus(
                id=f"{number:060x}c0de", metadata=pb.ContainerMetadata(name=vm), state=vm_state,
                created_at=created, started_at=created + 10**9, image=pb.ImageSpec(image=more.get("image", "debian-12.qcow2")),
                labels=more.get("labels", {}), annotations=annotations, message=more.get("message", ""),
            )  # fmt: skip
        pod = FakePod(status, its_vm, more.get("startup", []), more.get("facts", {}))
        self.pods[status.id] = pod
        self.tell(pod, "CREATED")
        return pod

    def end(self, pod: FakePod, code: int = 0, message: str = "") -> None:
        assert pod.vm is not None
        pod.vm.state = pb.CONTAINER_EXITED
        pod.vm.finished_at = time.time_ns()
        pod.vm.exit_code = code
        pod.vm.reason = "Error" if code else "Completed"
        pod.vm.message = message
        self.tell(pod, "STOPPED")

    def remove(self, pod: FakePod) -> None:
        del self.pods[pod.status.id]
        self.tell(pod, "DELETED")

    def tell(self, pod: FakePod, kind: str) -> None:
        event = pb.ContainerEventResponse(
            container_id=pod.vm.id if pod.vm else pod.status.id,
            container_event_type=pb.ContainerEventType.Value(f"CONTAINER_{kind}_EVENT"),
            created_at=time.time_ns(),
            pod_sandbox_status=pod.status,
            containers_statuses=[pod.vm] if pod.vm else [],
        )
        for listener in list(self._listeners):
            listener.put(event)

    def disconnect_streams(self) -> None:
        self._streaming.disconnect()

    def consoles(self) -> int:
        """The number of attached clients."""
        return len(self._streaming._open)

    # --- CRI

    def Version(self, request: Any, context: Any) -> Any:
        return pb.VersionResponse(version="0.1.0", runtime_name="virtshim", runtime_version="1.2.3")

    def Status(self, request: Any, context: Any) -> Any:
        conditions = [
            pb.RuntimeCondition(type=name, status=not trouble, reason="Reason", message=trouble)
            for name, trouble in self.conditions.items()
        ]
        return pb.StatusResponse(
            status=pb.RuntimeStatus(conditions=conditions), info={"config": json.dumps(self.facts)}
        )

    def ListPodSandbox(self, request: Any, context: Any) -> Any:
        return pb.ListPodSandboxResponse(
            items=[
                pb.PodSandbox(
                    id=one.id, metadata=one.metadata, state=one.state, created_at=one.created_at,
                    labels=one.labels, annotations=one.annotations, runtime_handler=one.runtime_handler,
                )
                for one in (pod.status for pod in list(self.pods.values()))
            ]
        )  # fmt: skip

    def ListContainers(self, request: Any, context: Any) -> Any:
        return pb.ListContainersResponse(
            containers=[
                pb.Container(
                    id=pod.vm.id, pod_sandbox_id=pod.status.id, metadata=pod.vm.metadata, state=pod.vm.state,
                    created_at=pod.vm.created_at, image=pod.vm.image,
                )
                for pod in list(self.pods.values())
                if pod.vm
            ]
        )  # fmt: skip

    def PodSandboxStatus(self, request: Any, context: Any) -> Any:
        pod = self._pod(request.pod_sandbox_id, context)
        info = {"info": json.dumps({"phase": "ready", "netns": "/run/netns/x"})} if request.verbose else {}
        return pb.PodSandboxStatusResponse(status=pod.status, info=info)

    def ContainerStatus(self, request: Any, context: Any) -> Any:
        for pod in list(self.pods.values()):
            if pod.vm and pod.vm.id == request.container_id:
                facts = {"domainName": "virtshim-x", **pod.facts}
                return pb.ContainerStatusResponse(status=pod.vm, info={"info": json.dumps(facts)})
        return context.abort(grpc.StatusCode.NOT_FOUND, "no such container")

    def ListPodSandboxStats(self, request: Any, context: Any) -> Any:
        return pb.ListPodSandboxStatsResponse(stats=[self._stats(pod) for pod in list(self.pods.values())])

    def _stats(self, pod: FakePod) -> Any:
        stats = pb.PodSandboxStats(attributes=pb.PodSandboxAttributes(id=pod.status.id, metadata=pod.status.metadata))
        if pod.vm is None or pod.vm.state != pb.CONTAINER_RUNNING:
            return stats
        pod.looks += 1
        now = time.time_ns()
        stats.linux.cpu.timestamp = now
        stats.linux.cpu.usage_core_nano_seconds.value = int((now - pod.vm.started_at) * pod.load)
        stats.linux.memory.working_set_bytes.value = pod.memory
        card = stats.linux.network.default_interface
        stats.linux.network.timestamp = now
        card.name, card.rx_bytes.value, card.tx_bytes.value = "eth0", pod.looks * 90_000, pod.looks * 40_000
        return stats

    def ListPodSandboxMetrics(self, request: Any, context: Any) -> Any:
        return pb.ListPodSandboxMetricsResponse(
            pod_metrics=[
                pb.PodSandboxMetrics(
                    pod_sandbox_id=pod.status.id,
                    container_metrics=[
                        pb.ContainerMetrics(
                            container_id=pod.vm.id,
                            metrics=[
                                _metric("virtshim_vmi_storage_read_traffic_bytes_total", pod.looks * 2_000_000),
                                _metric("virtshim_vmi_storage_write_traffic_bytes_total", pod.looks * 700_000),
                                _metric("virtshim_vmi_memory_domain_bytes", 1 << max(30, pod.memory.bit_length())),
                                _metric("virtshim_vmi_vcpu_seconds_total", 1),
                                _metric("virtshim_vmi_vcpu_seconds_total", 1),
                            ],
                        )
                    ],
                )
                for pod in list(self.pods.values())
                if pod.vm and pod.looks
            ]
        )

    def GetContainerEvents(self, request: Any, context: Any) -> Iterator[Any]:
        events: queue.Queue[pb.ContainerEventResponse | None] = queue.Queue()
        self._listeners.append(events)
        context.add_callback(lambda: events.put(None))
        context.send_initial_metadata(())
        try:
            yield from iter(events.get, None)
        finally:
            self._listeners.remove(events)

    def PortForward(self, request: Any, context: Any) -> Any:
        self._pod(request.pod_sandbox_id, context)
        return pb.PortForwardResponse(url=f"{self._streaming.url}/portforward/x")

    def AttachConsole(self, request: Any, context: Any) -> Any:
        if request.stdin and not self.takes_input:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "was created without stdin")
        return admin_pb2.AttachConsoleResponse(url=f"{self._streaming.url}/attach/x")

    # --- operators' actions

    def Pause(self, request: Any, context: Any) -> Any:
        return self._act("pause", request, context, "paused by virtshim pause; virtshim resume continues it")

    def Resume(self, request: Any, context: Any) -> Any:
        return self._act("resume", request, context)

    def Reset(self, request: Any, context: Any) -> Any:
        return self._act("reset", request, context)

    def Reboot(self, request: Any, context: Any) -> Any:
        return self._act("reboot", request, context)

    def _act(self, action: str, request: Any, context: Any, message: str = "") -> Any:
        """`message`: the VM's from then on."""
        self.acted.append(action)
        assert self.goes_on.wait(60)
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        pod = next(pod for pod in self.pods.values() if pod.vm and pod.vm.id.startswith(request.id))
        assert pod.vm is not None
        pod.vm.message = message
        metadata = pod.status.metadata
        taken = operator_pb2.Action(
            at=time.time_ns(), action=action, container_id=pod.vm.id, pod_sandbox_id=pod.status.id,
            namespace=metadata.namespace, pod=metadata.name, message=f"{action} is done",
        )  # fmt: skip
        self._actions.append(taken)
        for follower in list(self._followers):
            follower.put(taken)
        return operator_pb2.ActionResponse(changed=True, message=taken.message)

    def StopContainer(self, request: Any, context: Any) -> Any:
        self.acted.append(f"stop within {request.timeout} s")
        self.end(next(pod for pod in self.pods.values() if pod.vm and pod.vm.id == request.container_id))
        return pb.StopContainerResponse()

    def StopPodSandbox(self, request: Any, context: Any) -> Any:
        self._pod(request.pod_sandbox_id, context).status.state = pb.SANDBOX_NOTREADY
        return pb.StopPodSandboxResponse()

    def Screenshot(self, request: Any, context: Any) -> Any:
        return operator_pb2.ScreenshotResponse(png=self.picture)

    def FollowActions(self, request: Any, context: Any) -> Iterator[Any]:
        actions: queue.Queue[operator_pb2.Action | None] = queue.Queue()
        for one in self._actions:
            if one.at > request.since:
                actions.put(one)
        self._followers.append(actions)
        context.add_callback(lambda: actions.put(None))
        try:
            yield from iter(actions.get, None)
        finally:
            self._followers.remove(actions)

    def Inspect(self, request: Any, context: Any) -> Any:
        pod = next(pod for pod in self.pods.values() if pod.vm and pod.vm.id.startswith(request.id))
        return operator_pb2.InspectResponse(json=json.dumps({"container": pod.facts}))

    def StartUps(self, request: Any, context: Any) -> Any:
        pod = self._pod(request.id, context)
        assert pod.vm is not None
        phases = [
            operator_pb2.Phase(
                name=one["name"], container_id=pod.vm.id if one.get("vm", True) else "",
                began_at=int(one["began"] * 1e9), duration=int(one["seconds"] * 1e9), is_over=one.get("over", True),
                error=one.get("error", ""),
            )
            for one in pod.startup
        ]  # fmt: skip
        start = operator_pb2.StartUp(pod_sandbox_id=pod.status.id, phases=phases)
        return operator_pb2.StartUpsResponse(start_ups=[start])

    def _pod(self, wanted: str, context: Any) -> FakePod:
        if wanted not in self.pods:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no sandbox {wanted[:40]}")
        return self.pods[wanted]


def _metric(name: str, value: int) -> pb.Metric:
    return pb.Metric(name=name, value=pb.UInt64Value(value=value))


class _Streaming:
    """The streaming server: each console prints the greeting, then the input after "typed: "."""

    def __init__(self, node: DashboardNode) -> None:
        self._node = node
        self._started = threading.Event()
        self._open: set[web.WebSocketResponse] = set()
        self.url = ""

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)

    def disconnect(self) -> None:
        """Drops all connections without a closing message."""

        def cut() -> None:
            for one in list(self._open):
                if one._req is not None and one._req.transport is not None:
                    one._req.transport.abort()

        self._loop.call_soon_threadsafe(cut)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/attach/x", self._attach)
        app.router.add_get("/portforward/x", self._forward)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._over.wait()
        for one in list(self._open):
            await one.close()
        await runner.cleanup()

    async def _attach(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io"])
        await socket.prepare(request)
        self._open.add(socket)
        node = self._node
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(b"\x01" + node.greeting)
            if node.flood is not None:
                for piece in node.flood():
                    await socket.send_bytes(b"\x01" + piece)
            async for message in socket:
                if message.type is WSMsgType.BINARY and message.data[:1] == b"\x00":
                    node.typed += message.data[1:]
                    await socket.send_bytes(b"\x01" + message.data[1:].replace(b"\r", b"\r\ntyped\r\n"))
                elif message.type is WSMsgType.BINARY and message.data[:1] == b"\x04":
                    node.sizes.append(json.loads(message.data[1:]))
        self._open.discard(socket)
        return socket

    async def _forward(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        await socket.send_bytes(b"\x00\x0c\x17")
        await socket.send_bytes(b"\x01\x0c\x17")
        await socket.send_bytes(b"\x01nobody listens there")
        await socket.close()
        return socket


def startup_of(began: float) -> list[dict[str, Any]]:
    """Phases as virtshim reports them: name, whether of the VM, begin, duration."""
    told = [
        ("sandbox", False, 0, 0.168), ("network", False, 0.002, 0.16), ("create", True, 0.18, 0.042), ("disk", True, 0.18, 0.01),
        ("seed", True, 0.195, 0.006), ("define", True, 0.202, 0.011), ("start", True, 0.23, 0.15), ("libvirt", True, 0.236, 0.14),
        ("firmware", True, 0.38, 0.9), ("agent", True, 0.38, 5.4), ("kernel", True, 1.28, 1.7), ("user-space", True, 2.98, 3.6),
        ("cloud-init", True, 3.4, 2.9),
    ]  # fmt: skip
    return [{"name": name, "vm": of_vm, "began": began + at, "seconds": seconds} for name, of_vm, at, seconds in told]


if __name__ == "__main__":
    with DashboardNode(sys.argv[1]) as alone:
        names = ["postgres", "web", "build-runner", "windows-2022", "router", "debian", "fedora-coreos", "k6-load"]
        for index in range(int(sys.argv[2])):
            made = alone.add(
                f"{names[index % len(names)]}-{index}" if index >= len(names) else names[index],
                ["default", "databases", "ci"][index % 3],
                created=60.0 + 411 * index, screen=index % 2 == 0, startup=startup_of(time.time() - 60 - 411 * index),
                state="EXITED" if index % 7 == 6 else "RUNNING",
                labels={"app": names[index % len(names)], "io.kubernetes.pod.name": f"pod-{index}"},
            )  # fmt: skip
            made.load, made.memory = 0.03 + (index * 37 % 90) / 60, (150 + index * 97 % 800) << 20
        print("ready", flush=True)
        sys.stdin.read()
