"""A node whose primary makes pods with a VM of virtshim's: the proxy in front of fake runtimes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from fakes.cri import Client
from fakes.journal import WAIT_LIMIT
from fakes.kubelet_calls import Kubelet, KubeletPod
from fakes.proxy import Proxy
from fakes.runtime import FakeRuntime
from podclient import wait_until

from criproto.operator_v1 import operator_pb2 as operator
from criproto.runtime_v1 import api_pb2 as pb

HANDLER = "virtshim-pod"
DISK = "virtlet.cloud/disk"
NETNS = "/var/run/netns/cni-1"


@dataclass(frozen=True)
class Node:
    """`admin` answers on virtshim's socket for its own calls."""

    proxy: Proxy
    primary: FakeRuntime
    virtshim: FakeRuntime
    admin: FakeRuntime

    @property
    def client(self) -> Client:
        return self.proxy.client

    @property
    def kubelet(self) -> Kubelet:
        return Kubelet(self.client.runtime, self.client.image)

    def run(self, name: str = "web", **annotations: str) -> KubeletPod:
        made = KubeletPod(self.kubelet, name, HANDLER, dict(annotations))
        made.run()
        return made

    def adopted(self) -> list[operator.AdoptRequest]:
        """The calls that adopted a sandbox, without those that only checked."""
        told = [operator.AdoptRequest.FromString(call.request) for call in self.admin.asked("Adopt")]
        return [one for one in told if one.sandbox_id]

    def order(self, *methods: str) -> list[str]:
        """Who was asked for these methods, in order."""
        at = {id(call): runtime.name for runtime in (self.primary, self.virtshim) for call in runtime.calls}
        calls = [call for runtime in (self.primary, self.virtshim) for call in runtime.calls]
        found = [call for call in calls if call.method.rpartition("/")[2] in methods]
        return [at[id(call)] for call in sorted(found, key=lambda call: call.at)]

    def again(self) -> None:
        """Kills and starts the proxy."""
        self.proxy.stop(signal.SIGKILL)
        self.proxy.start()
        wait_until(lambda: is_answering(self.client), WAIT_LIMIT, "the proxy is reached again")


def done(_request: bytes, _context: Any) -> bytes:
    return b""


def is_answering(client: Client) -> bool:
    try:
        client.Version(pb.VersionRequest())  # refused while lists are
    except grpc.RpcError:
        return False
    return True


def status_of(primary: FakeRuntime, **changes: Any) -> Any:
    """The primary's answer to PodSandboxStatus: as containerd tells it, verbosely, with a network."""

    def answer(request: bytes, context: Any) -> bytes:
        asked = pb.PodSandboxStatusRequest.FromString(request)
        if (one := primary.pods.get(asked.pod_sandbox_id)) is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no sandbox {asked.pod_sandbox_id}")
            raise AssertionError("abort raises")
        told = pb.PodSandboxStatusResponse()
        told.status.id, told.status.state = one.id, one.state
        told.status.runtime_handler = changes.get("handler", one.runtime_handler)
        told.status.metadata.CopyFrom(one.metadata)
        told.status.network.ip = "10.88.0.7"
        told.status.network.additional_ips.add(ip="fd00::7")
        told.timestamp = changes.get("timestamp", 0)
        told.containers_statuses.extend(changes.get("containers", ()))
        if asked.verbose:
            namespaces = changes.get("namespaces", [{"type": "pid"}, {"type": "network", "path": NETNS}])
            info = {"runtimeSpec": {"linux": {"namespaces": namespaces}}, **changes.get("info", {})}
            told.info["info"] = json.dumps(info)
        return told.SerializeToString()

    return answer


@contextlib.contextmanager
def serving(others: str = "", settings: str = "") -> Iterator[Node]:
    place = Path(tempfile.mkdtemp(prefix="vp-", dir="/var/tmp"))
    os.mkdir(place / "run")
    with (
        FakeRuntime(f"{place}/primary.sock", "primary") as primary,
        FakeRuntime(f"{place}/virtshim.sock", "virtshim") as virtshim,
        FakeRuntime(f"{place}/run/admin.sock", "admin") as admin,
        Proxy(place, primary.socket, virtshim.socket, settings, others, other_is_virtshim=True) as proxy,
    ):
        yield Node(proxy, primary, virtshim, admin)
    shutil.rmtree(place)


def fresh(node: Node) -> Node:
    for runtime in (node.primary, node.virtshim, node.admin):
        for records in (runtime.calls, runtime.answers, runtime.pods, runtime.containers, runtime.images):
            records.clear()
        runtime.answers.update(dict.fromkeys(("StopPodSandbox", "RemovePodSandbox", "Adopt"), done))
    node.primary.answers["PodSandboxStatus"] = status_of(node.primary)
    node.virtshim.answers["CreateContainer"] = creating(node.virtshim)
    return node


def creating(virtshim: FakeRuntime) -> Any:
    """virtshim creates containers in sandboxes that it does not list."""

    def create(request: bytes, _context: Any) -> bytes:
        asked = pb.CreateContainerRequest.FromString(request)
        made = virtshim.add_container(asked.pod_sandbox_id, asked.config, pb.CONTAINER_CREATED)
        return pb.CreateContainerResponse(container_id=made).SerializeToString()

    return create


def hangs(request: bytes, context: Any) -> bytes:
    """Answers when the caller has given up."""
    gone = threading.Event()
    context.add_callback(gone.set)
    gone.wait(WAIT_LIMIT)
    return b""
