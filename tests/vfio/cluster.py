"""kubelet's requests to the node, in the machine where everything is emulated twice."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from fakes.kubelet import FakeKubelet
from node import VIRTSHIM, Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

from criproto.deviceplugin_v1beta1 import deviceplugin_pb2 as plugin_pb
from criproto.runtime_v1 import api_pb2 as pb

# Everything is ten times slower here. A plugin that checked all devices each second would do nothing else.
WAIT_LIMIT = 600.0
MEMORY = 32 << 20

_PLUGIN = """
paths.state_dir = "/var/tmp/n/state"
[device_plugin]
directory = "/run/device-plugins"
interval = 5.0
deliver = "%s"
"""
_RESOURCE = """
[[device_plugin.resources]]
name = "%s"
%s
"""


class Cluster:
    """kubelet's requests to the node."""

    def __init__(self, client: PodClient, image: str, directory: str) -> None:
        self._client = client
        self._source = image
        self._image = client.pull(image)
        self._directory = directory

    def with_guest(self, file: str) -> Cluster:
        """The same cluster with another image of the same server for its containers."""
        return Cluster(self._client, f"{self._source.rpartition('/')[0]}/{file}", self._directory)

    def sandbox(self, name: str) -> Sandbox:
        # A separate directory, so that the log of another chapter's pod of that name is not read.
        pod = pod_config(name, f"{self._directory}/logs/{name}-{uuid.uuid4().hex[:8]}")
        return Sandbox(self._client, pod, self._client.run_pod(pod))

    def container(
        self,
        *answers: plugin_pb.ContainerAllocateResponse,
        devices: tuple[str, ...] = (),
        envs: Mapping[str, str] | None = None,
    ) -> pb.ContainerConfig:
        """A container as kubelet makes it from the answers of device plugins, with each node once."""
        config = container_config(self._image, memory=MEMORY)
        nodes: dict[str, pb.Device] = {}
        for answer in answers:
            config.envs.extend(pb.KeyValue(key=key, value=value.encode()) for key, value in answer.envs.items())
            config.CDI_devices.extend(pb.CDIDevice(name=device.name) for device in answer.cdi_devices)
            for node in answer.devices:
                nodes.setdefault(
                    node.container_path,
                    pb.Device(
                        container_path=node.container_path, host_path=node.host_path, permissions=node.permissions
                    ),
                )
        for path in devices:
            nodes.setdefault(path, pb.Device(container_path=path, host_path=path, permissions="rw"))
        config.devices.extend(nodes.values())
        config.envs.extend(pb.KeyValue(key=key, value=value.encode()) for key, value in (envs or {}).items())
        return config


@dataclass(frozen=True)
class Sandbox:
    client: PodClient
    config: pb.PodSandboxConfig
    id: str

    def run(self, config: pb.ContainerConfig) -> list[str]:
        """Creates and starts it, and waits for the guest's marker. Returns its console."""
        return log_lines(self.client.status(self.started(config)).log_path)

    def started(self, config: pb.ContainerConfig) -> str:
        """The same as `run`; returns the container's id."""
        container = self.client.create(self.id, config, self.config)
        self.client.start(container)
        wait_for_log(self.client.status(container).log_path, "device guest: done", WAIT_LIMIT)
        return container

    def refusal(self, config: pb.ContainerConfig, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The refusal's message, and whether it came at creation or start. `meanwhile`: runs between these two."""
        before = len(self.client.containers())
        stage = "create"
        try:
            container = self.client.create(self.id, config, self.config)
            meanwhile()
            stage = "start"
            self.client.start(container)
        except grpc.RpcError as exc:
            left = len(self.client.containers()) - before
            return {"of": stage, "code": exc.code().name, "message": exc.details(), "left": left}
        return {"of": "", "code": "OK", "message": "it runs", "left": 1}

    def kill(self, node: Node) -> str:
        """Kills the only running QEMU; returns the container's id once it has ended."""
        (container,) = [one.id for one in self.client.containers() if one.pod_sandbox_id == self.id]
        (pid,) = node.qemu_pids()
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: self.client.status(container).state == pb.CONTAINER_EXITED, WAIT_LIMIT, "the container has ended"
        )
        return container

    def remove(self) -> None:
        self.client.remove_pod(self.id)


@contextmanager
def device_plugin(kubelet: FakeKubelet, deliver: str, resources: Mapping[str, str]) -> Iterator[Path]:
    """Runs `virtshim device-plugin`, registered for its resources; yields its log. `deliver`: nodes or cdi. `resources`:
    by name, the line of TOML that chooses its devices."""
    settings, log = Path("/run/device-plugin.toml"), Path("/run/device-plugin.log")
    settings.write_text(_PLUGIN % deliver + "".join(_RESOURCE % item for item in resources.items()))
    kubelet.plugins.clear()
    with log.open("wb") as file:
        process = subprocess.Popen([*VIRTSHIM, "device-plugin", "--config", str(settings)], stdout=file, stderr=file)
    try:

        def known() -> bool:
            return process.poll() is not None or all(
                resource in kubelet.plugins and kubelet.plugins[resource].lists for resource in resources
            )

        wait_until(known, WAIT_LIMIT, "the device plugin has registered")
        assert process.poll() is None, log.read_text()
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def kill_daemons(node: Node, client: PodClient, *names: str) -> None:
    """Kills the daemons by SIGKILL; returns when they serve again."""
    signs = {"tapmanager": "tapmanager.ready", "virtshim": "cri.serving"}
    before = {name: node.log().count(signs[name]) for name in names}
    for name in names:
        os.kill(node.daemons()[name], signal.SIGKILL)
    try:
        wait_until(
            lambda: all(node.log().count(signs[name]) > count for name, count in before.items()) and _serves(client),
            WAIT_LIMIT,
            f"{', '.join(names)} serve again",
        )
    except TimeoutError as exc:
        raise TimeoutError(f"{exc}; their log: {node.log()[-4000:]}") from exc


def _serves(client: PodClient) -> bool:
    try:
        client.pods()
    except grpc.RpcError:
        return False
    return True
