"""A kubelet's side of the device plugin interface, over real sockets: takes registrations, watches devices, allocates."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from criproto.deviceplugin_v1beta1 import deviceplugin_pb2 as pb
from criproto.deviceplugin_v1beta1 import deviceplugin_pb2_grpc

_SECONDS = 10.0


@dataclass
class Plugin:
    """A registered plugin, as kubelet knows it. `lists`: each answer of its stream, as device -> health."""

    request: pb.RegisterRequest
    stub: deviceplugin_pb2_grpc.DevicePluginStub
    channel: grpc.Channel
    lists: list[dict[str, str]] = field(default_factory=list)
    last: pb.ListAndWatchResponse | None = None

    def allocate(self, *devices: str) -> pb.ContainerAllocateResponse:
        asked = pb.ContainerAllocateRequest(devices_ids=devices)
        answer = self.stub.Allocate(pb.AllocateRequest(container_requests=[asked]), timeout=_SECONDS)
        return answer.container_responses[0]

    def prefer(self, available: list[str], size: int, must: tuple[str, ...] = ()) -> list[str]:
        asked = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )
        answer = self.stub.GetPreferredAllocation(
            pb.PreferredAllocationRequest(container_requests=[asked]), timeout=_SECONDS
        )
        return list(answer.container_responses[0].deviceIDs)


class FakeKubelet(deviceplugin_pb2_grpc.RegistrationServicer):
    """`plugins` by resource. As the real one, it removes all sockets of the directory when it starts, and dials a plugin back
    before it answers Register; `refuse` is what it says to all registrations instead."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plugins: dict[str, Plugin] = {}
        self.registrations = 0
        self.refuse = ""
        self._watchers: list[threading.Thread] = []

    def start(self) -> None:
        for socket in self.directory.glob("*.sock"):
            socket.unlink()
        self.plugins = {}
        self._server = grpc.server(ThreadPoolExecutor(4), options=(("grpc.so_reuseport", 0),))
        deviceplugin_pb2_grpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory}/kubelet.sock")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()
        for plugin in self.plugins.values():
            plugin.channel.close()
        for watcher in self._watchers:
            watcher.join(_SECONDS)
        (self.directory / "kubelet.sock").unlink(missing_ok=True)

    def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:
        self.registrations += 1
        if self.refuse:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refuse)
        assert request.version == "v1beta1"
        assert os.sep not in request.endpoint
        channel = grpc.insecure_channel(f"unix:{self.directory}/{request.endpoint}")
        stub = deviceplugin_pb2_grpc.DevicePluginStub(channel)
        options = stub.GetDevicePluginOptions(pb.Empty(), timeout=_SECONDS)
        assert options == request.options
        plugin = Plugin(request, stub, channel)
        self.plugins[request.resource_name] = plugin
        watcher = threading.Thread(target=self._watch, args=(plugin,), daemon=True)
        self._watchers.append(watcher)
        watcher.start()
        return pb.Empty()

    def _watch(self, plugin: Plugin) -> None:
        try:
            for answer in plugin.stub.ListAndWatch(pb.Empty()):
                plugin.last = answer
                plugin.lists.append({device.ID: device.health for device in answer.devices})
        except (grpc.RpcError, ValueError):  # ValueError: the channel was closed already
            plugin.lists.append({})
