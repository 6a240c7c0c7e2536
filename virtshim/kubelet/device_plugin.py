"""`virtshim device-plugin`: serves each resource on a socket in kubelet's directory and keeps it registered with kubelet.

When kubelet starts, it removes all sockets of its directory, creates a new kubelet.sock, and knows no plugins. So the plugin
checks its sockets and kubelet.sock every second, and listens and registers again if one has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from criproto.deviceplugin_v1beta1 import deviceplugin_pb2 as pb
from criproto.deviceplugin_v1beta1 import deviceplugin_pb2_grpc
from virtshim.devices.pools import HostFunction, Offer, Pool, offers, overlap, preferred, socket_of
from virtshim.model.errors import ShimError
from virtshim.system.files import open_regular, replace_text
from virtshim.system.grpc_socket import listen
from virtshim.system.threads import Workers

_CDI_FILE_VERSION: Final = "0.6.0"


def cdi_file_qualified_name(pool: Pool, offer: Offer) -> str:
    """The device's CDI name, vendor/class=device. The CDI kind vendor/class is the resource's name."""
    return f"{pool.resource}={offer.id}"


def specification(pool: Pool, offers: Sequence[Offer]) -> dict[str, Any]:
    """The CDI specification of the offers with device nodes. VM runtimes read the annotation `bdf`, which holds one address. An
    IOMMU group with several functions has none; its node and the container's variable identify the functions."""
    return {
        "cdiVersion": _CDI_FILE_VERSION,
        "kind": pool.resource,
        "devices": [
            {
                "name": offer.id,
                "annotations": {"bdf": str(offer.functions[0])} if len(offer.functions) == 1 else {},
                "containerEdits": {"deviceNodes": [{"path": node, "permissions": "rw"} for node in offer.nodes]},
            }
            for offer in offers
            if offer.group is not None
        ],
    }


def write_cdi_file(directory: str, pool: Pool, offers: Sequence[Offer]) -> None:
    """Replaces the CDI file atomically if its content changes. The file stays when the plugin ends, because restarted containers
    still use its names. Raises OSError."""
    path = f"{directory}/virtshim-{pool.resource.replace('/', '_')}.json"
    text = json.dumps(specification(pool, offers), indent=1)
    if _holds(path, text.encode()):
        return
    os.makedirs(directory, mode=0o755, exist_ok=True)
    replace_text(path, text, 0o644)


def _holds(path: str, text: bytes) -> bool:
    """Whether `path` is a regular file with this content. Does not block on a FIFO."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        return file.read(len(text) + 1) == text
    return False


log = structlog.get_logger(__name__)

HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"

# Seconds. How often an idle stream checks whether its client is gone.
_LOOK: Final = 5.0


class ResourceServer(deviceplugin_pb2_grpc.DevicePluginServicer):
    """One resource's DevicePlugin service. `cdi_name` makes an offer's CDI name; with None, containers get device nodes.

    By kubelet's interface v1beta1, ListAndWatch sends all devices each time and never ends while the plugin lives. kubelet calls
    Allocate at a pod's admission, and an error fails the pod."""

    def __init__(self, pool: Pool, cdi_name: Callable[[Offer], str] | None = None) -> None:
        self._pool = pool
        self._cdi_name = cdi_name
        self._changed = threading.Condition()
        self._offers: Mapping[str, Offer] = {}
        self._version = 0
        self._ended = False

    def offer(self, offers: Sequence[Offer]) -> None:
        """Replaces all offers, and informs kubelet of a change."""
        found = {offer.id: offer for offer in offers}
        with self._changed:
            if found == self._offers:
                return
            for offer in offers:
                before = self._offers.get(offer.id)
                if before is None or before.fault != offer.fault:
                    log.info(
                        "device.health", resource=self._pool.resource, device=offer.id, fault=offer.fault or "none"
                    )
            for gone in self._offers.keys() - found.keys():
                log.warning("device.gone", resource=self._pool.resource, device=gone)
            self._offers = found
            self._version += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Ends the streams. `begin` allows new ones."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def begin(self) -> None:
        with self._changed:
            self._ended = False

    def GetDevicePluginOptions(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    def ListAndWatch(self, request: pb.Empty, context: grpc.ServicerContext) -> Iterator[pb.ListAndWatchResponse]:
        sent = -1
        while context.is_active():
            with self._changed:
                if self._ended:
                    return
                if sent == self._version:
                    self._changed.wait(_LOOK)
                    continue
                sent, offers = self._version, tuple(self._offers.values())
            yield pb.ListAndWatchResponse(devices=[_device(offer) for offer in offers])

    def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        offers = tuple(self._offers.values())
        return pb.PreferredAllocationResponse(
            container_responses=[
                pb.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred(
                        offers, asked.available_deviceIDs, asked.must_include_deviceIDs, asked.allocation_size
                    )
                )
                for asked in request.container_requests
            ]
        )

    def Allocate(self, request: pb.AllocateRequest, context: grpc.ServicerContext) -> pb.AllocateResponse:
        return pb.AllocateResponse(
            container_responses=[self._allocated(asked.devices_ids, context) for asked in request.container_requests]
        )

    def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()  # kubelet does not call it, because the options do not ask for it

    def _allocated(self, ids: Sequence[str], context: grpc.ServicerContext) -> pb.ContainerAllocateResponse:
        granted = [self._granted(device, context) for device in ids]
        functions = [str(function) for offer in granted for function in offer.functions]
        answer = pb.ContainerAllocateResponse(envs={self._pool.variable: ",".join(functions)})
        if self._cdi_name is not None:
            answer.cdi_devices.extend(pb.CDIDevice(name=self._cdi_name(offer)) for offer in granted)
        else:
            nodes = dict.fromkeys(node for offer in granted for node in offer.nodes)
            answer.devices.extend(
                pb.DeviceSpec(host_path=node, container_path=node, permissions="rw") for node in nodes
            )
        log.info("device.allocated", resource=self._pool.resource, devices=functions)
        return answer

    def _granted(self, device: str, context: grpc.ServicerContext) -> Offer:
        offer = self._offers.get(device)
        name = f"{self._pool.resource}: device {device[:80]!r}"
        if offer is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{name} is no longer on this node")
        if offer.fault:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{name} cannot be used now: {offer.fault}")
        return offer


def _device(offer: Offer) -> pb.Device:
    topology = None if offer.numa is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=offer.numa)])
    return pb.Device(ID=offer.id, health=UNHEALTHY if offer.fault else HEALTHY, topology=topology)


_DEVICE_PLUGIN_VERSION: Final = "v1beta1"
_REGISTER_SECONDS: Final = 10.0
# Each stream holds a thread, and streams of earlier kubelets may linger.
_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class KubeletPlugins:
    """kubelet's directory, which holds kubelet.sock and the plugins' sockets."""

    directory: str = "/var/lib/kubelet/device-plugins"

    def kubelet(self) -> tuple[int, int] | None:
        """Identifies this kubelet.sock; None if there is none."""
        return _identity(f"{self.directory}/kubelet.sock")

    def register(self, resource: str, endpoint: str) -> None:
        """Raises grpc.RpcError."""
        with grpc.insecure_channel(f"unix:{self.directory}/kubelet.sock") as channel:
            deviceplugin_pb2_grpc.RegistrationStub(channel).Register(
                pb.RegisterRequest(
                    version=_DEVICE_PLUGIN_VERSION,
                    endpoint=endpoint,
                    resource_name=resource,
                    options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
                ),
                timeout=_REGISTER_SECONDS,
            )


class ResourcePlugin:
    """One resource's socket and its registration with kubelet."""

    def __init__(self, pool: Pool, plugins: KubeletPlugins, service: ResourceServer) -> None:
        self._pool = pool
        self._plugins = plugins
        self.service = service
        self._endpoint = socket_of(pool.resource)
        self._path = f"{plugins.directory}/{self._endpoint}"
        self._server: grpc.Server | None = None
        self._workers: Workers | None = None
        self._socket: tuple[int, int] | None = None
        self._registered: tuple[int, int] | None = None
        self._trouble = ""

    def keep_registered(self) -> None:
        """Listens and registers, if necessary. Logs errors and never raises; the next call tries again."""
        kubelet = self._plugins.kubelet()
        if kubelet is None:
            self._registered = None
            self._warn_once(
                "plugin.waiting_for_kubelet",
                f"{self._plugins.directory}/kubelet.sock is not there: kubelet is not running",
            )
            return
        try:
            if self._server is None or _identity(self._path) != self._socket:
                self._listen()
                self._registered = None
            if self._registered != kubelet:
                self._plugins.register(self._pool.resource, self._endpoint)
                self._registered = kubelet
                log.info("plugin.registered", resource=self._pool.resource, socket=self._path)
            self._trouble = ""
        except grpc.RpcError as exc:
            self._warn_once("plugin.not_registered", f"{exc.code().name} {exc.details() or ''}".strip())
        except (OSError, ShimError) as exc:
            self._warn_once("plugin.not_listening", str(exc))

    def _warn_once(self, event: str, reason: str) -> None:
        if reason != self._trouble:
            log.warning(event, resource=self._pool.resource, reason=reason)
        self._trouble = reason

    def close(self) -> None:
        if self._server is None:
            return
        self.service.end()
        self._server.stop(1.0).wait()
        self._server = None
        if _identity(self._path) == self._socket:  # unless a later plugin replaced it
            Path(self._path).unlink(missing_ok=True)

    def _listen(self) -> None:
        self.close()
        self.service.begin()
        self._workers = self._workers or Workers(_THREADS, "plugin")
        server = grpc.server(self._workers, options=(("grpc.so_reuseport", 0),))
        deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(self.service, server)
        listen(server, self._path)
        server.start()
        self._server = server
        self._socket = _identity(self._path)


class DevicePlugin:
    """All resources of a node. `functions` reads the present PCI functions. `publish` writes a resource's CDI file before kubelet
    gets the offers, and may raise OSError."""

    def __init__(
        self,
        plugins: Mapping[str, ResourcePlugin],
        pools: Sequence[Pool],
        functions: Callable[[], Sequence[HostFunction]],
        publish: Callable[[Pool, Sequence[Offer]], None],
    ) -> None:
        self._plugins = plugins
        self._pools = pools
        self._functions = functions
        self._publish = publish
        self._reported: Mapping[str, str] = {}

    def run(self, stopping: threading.Event, look_every: float, alive: Callable[[], object] = lambda: None) -> None:
        """Returns when `stopping` is set. Reads the devices every `look_every` seconds and checks kubelet every second; calls
        `alive` at each check."""
        until_look = 0.0
        try:
            while True:
                if until_look <= 0:
                    self.look()
                    until_look = look_every
                for plugin in self._plugins.values():
                    if not stopping.is_set():  # if kubelet hangs, each call waits for it
                        plugin.keep_registered()
                    alive()
                if stopping.wait(min(1.0, look_every)):
                    return
                until_look -= min(1.0, look_every)
        finally:
            for plugin in self._plugins.values():
                plugin.close()

    def look(self) -> None:
        """Reads the devices and informs kubelet of changes. A device in two resources is unhealthy in both."""
        node = self._functions()
        found = {pool.resource: offers(pool, node) for pool in self._pools}
        shared = overlap(found)
        if shared != self._reported:
            for group, resources in shared.items():
                log.error("device.in_two_resources", device=group, resources=resources)
            self._reported = shared
        for pool in self._pools:
            offered = [_unshared(offer, shared) for offer in found[pool.resource]]
            try:
                self._publish(pool, offered)
            except OSError as exc:
                fault = f"its CDI specification cannot be written: {exc.strerror}: {exc.filename}"
                offered = [dataclasses.replace(offer, fault=fault) for offer in offered]
            self._plugins[pool.resource].service.offer(offered)


def _unshared(offer: Offer, shared: Mapping[str, str]) -> Offer:
    resources = shared.get(offer.id if offer.group is None else f"group {offer.group}")
    if resources is None:
        return offer
    return Offer(
        offer.functions,
        offer.group,
        offer.numa,
        f"it is in {resources}: only one of device_plugin.resources may have it",
    )


def _identity(path: str) -> tuple[int, int] | None:
    """Inode and change time of a socket, because a new socket may reuse the inode of a removed one."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_ctime_ns) if stat.S_ISSOCK(found.st_mode) else None
