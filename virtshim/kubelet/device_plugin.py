"""`virtshim device-plugin`: a socket for each resource in kubelet's directory, registered there as long as kubelet lives.

A kubelet that starts removes all sockets of its directory and makes kubelet.sock anew, and knows no plugin then. Both are looked
at every second: a plugin whose socket is gone, or which registered with another kubelet, listens and registers again.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import structlog

from criproto.deviceplugin_v1beta1 import deviceplugin_pb2 as pb
from criproto.deviceplugin_v1beta1 import deviceplugin_pb2_grpc
from virtshim.domain.devices.pools import HostFunction, Offer, Pool, offers, overlap, socket_of
from virtshim.domain.errors import ShimError
from virtshim.grpc_socket import listen
from virtshim.kubelet.resource_server import ResourceServer
from virtshim.primitives.threads import Workers

log = structlog.get_logger(__name__)

_VERSION: Final = "v1beta1"
_REGISTER_SECONDS: Final = 10.0
# Streams of earlier kubelets may linger beside the present one's, and each holds a thread.
_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class KubeletPlugins:
    """The directory where kubelet has kubelet.sock and plugins have theirs."""

    directory: str = "/var/lib/kubelet/device-plugins"

    def kubelet(self) -> tuple[int, int] | None:
        """What tells one kubelet.sock from another; None if there is none."""
        return _identity(f"{self.directory}/kubelet.sock")

    def register(self, resource: str, endpoint: str) -> None:
        """Raises grpc.RpcError."""
        with grpc.insecure_channel(f"unix:{self.directory}/kubelet.sock") as channel:
            deviceplugin_pb2_grpc.RegistrationStub(channel).Register(
                pb.RegisterRequest(
                    version=_VERSION,
                    endpoint=endpoint,
                    resource_name=resource,
                    options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
                ),
                timeout=_REGISTER_SECONDS,
            )


class ResourcePlugin:
    """One resource: its socket, and whether this kubelet knows of it."""

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
        """Listens and registers, if that is not so already. Never raises: what fails is tried again at the next look."""
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
        """Once, and not every second."""
        if reason != self._trouble:
            log.warning(event, resource=self._pool.resource, reason=reason)
        self._trouble = reason

    def close(self) -> None:
        if self._server is None:
            return
        self.service.end()
        self._server.stop(1.0).wait()
        self._server = None
        if _identity(self._path) == self._socket:  # and not a later plugin's
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
    """All resources of a node. `functions` reads what PCI functions there are now; `publish` is told of each resource's offers
    before kubelet is (the CDI file), and may raise OSError."""

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
        """Returns when `stopping` is set. Devices are looked at every `look_every` seconds, kubelet every second; `alive` is
        called each time."""
        until_look = 0.0
        try:
            while True:
                if until_look <= 0:
                    self.look()
                    until_look = look_every
                for plugin in self._plugins.values():
                    if not stopping.is_set():  # a kubelet that hangs is waited for at each
                        plugin.keep_registered()
                    alive()
                if stopping.wait(min(1.0, look_every)):
                    return
                until_look -= min(1.0, look_every)
        finally:
            for plugin in self._plugins.values():
                plugin.close()

    def look(self) -> None:
        """Reads the devices and tells kubelet what changed. A device of two resources is unhealthy in both."""
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
        offer.functions, offer.group, offer.numa, f"it is in {resources}: no two device_plugin.resources may share it"
    )


def _identity(path: str) -> tuple[int, int] | None:
    """A socket made anew may get the inode of the removed one: its time of change tells."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_ctime_ns) if stat.S_ISSOCK(found.st_mode) else None
