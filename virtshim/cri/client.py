"""The CRI client of virtshim's command line: a node's pods and VMs, and URLs of their streams."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from criproto.admin_v1 import admin_pb2, admin_pb2_grpc
from criproto.runtime_v1 import api_pb2 as pb
from criproto.runtime_v1 import api_pb2_grpc
from virtshim.annotations.parse import VNC_ANNOTATION
from virtshim.cri.error_codes import kind_of
from virtshim.model import errors
from virtshim.model.errors import NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.streaming.ports import Streams

_SECONDS: Final = 30.0
# What the node gives a guest's agent to answer.
_AGENT_SECONDS: Final = 30.0
_MESSAGE_BYTES: Final = 16 << 20

_ERRORS: Final = {
    error.kind: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, ShimError) and error is not ShimError
}


@dataclass(frozen=True, slots=True)
class PodSummary:
    """`created`: seconds since 1970."""

    id: str
    namespace: str
    name: str
    is_ready: bool
    created: float


@dataclass(frozen=True, slots=True)
class VmSummary:
    """`state`: created, running, exited or unknown. `created`: seconds since 1970."""

    id: str
    pod: str
    name: str
    attempt: int
    state: str
    image: str
    created: float


class NodeClient:
    """Calls raise ShimError, with the kind and message that the node sent."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._runtime = api_pb2_grpc.RuntimeServiceStub(channel)
        self._admin = admin_pb2_grpc.AdminStub(channel)

    def pods(self) -> list[PodSummary]:
        """Newest first."""
        with as_shim_errors():
            items = self._runtime.ListPodSandbox(pb.ListPodSandboxRequest(), timeout=_SECONDS).items
        pods = [
            PodSummary(
                item.id,
                item.metadata.namespace,
                item.metadata.name,
                item.state == pb.SANDBOX_READY,
                item.created_at / 1e9,
            )
            for item in items
        ]
        return sorted(pods, key=lambda pod: pod.created, reverse=True)

    def vms(self) -> list[VmSummary]:
        """Newest first."""
        with as_shim_errors():
            items = self._runtime.ListContainers(pb.ListContainersRequest(), timeout=_SECONDS).containers
        vms = [
            VmSummary(
                item.id,
                item.pod_sandbox_id,
                item.metadata.name,
                item.metadata.attempt,
                pb.ContainerState.Name(item.state).removeprefix("CONTAINER_").lower(),
                item.image.image,
                item.created_at / 1e9,
            )
            for item in items
        ]
        return sorted(vms, key=lambda vm: vm.created, reverse=True)

    def addresses(self, pod: str) -> list[str]:
        """None for a pod that has gone meanwhile, or has no network any more."""
        try:
            with as_shim_errors():
                request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod)
                network = self._runtime.PodSandboxStatus(request, timeout=_SECONDS).status.network
        except NotFound:
            return []
        return [ip for ip in (network.ip, *(more.ip for more in network.additional_ips)) if ip]

    def exec_url(self, vm: str, command: Sequence[str], streams: Streams) -> str:
        request = pb.ExecRequest(
            container_id=vm,
            cmd=command,
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            tty=streams.tty,
        )
        with as_shim_errors():
            return self._runtime.Exec(request, timeout=_SECONDS).url

    def has_vnc(self, pod: str) -> bool:
        """Whether its port 5900 is its VM's screen."""
        with as_shim_errors():
            request = pb.PodSandboxStatusRequest(pod_sandbox_id=pod)
            status = self._runtime.PodSandboxStatus(request, timeout=_SECONDS).status
        return status.annotations.get(VNC_ANNOTATION) == "true"

    def add_ssh_keys(self, vm: str, user: str, keys: Sequence[str]) -> None:
        request = admin_pb2.AddSshKeysRequest(container_id=vm, user=user, keys=keys)
        with as_shim_errors():
            self._admin.AddSshKeys(request, timeout=_SECONDS + _AGENT_SECONDS)

    def console_url(self, vm: str, *, stdin: bool) -> str:
        request = admin_pb2.AttachConsoleRequest(container_id=vm, stdin=stdin)
        with as_shim_errors():
            return self._admin.AttachConsole(request, timeout=_SECONDS).url


@contextlib.contextmanager
def connected(socket: str) -> Iterator[NodeClient]:
    """A client of the node that serves CRI on this Unix socket; an unreachable one shows at the first call. Raises
    PermissionRefused for one that is somebody else's."""
    refuse_others_socket(socket)
    options = [("grpc.max_receive_message_length", _MESSAGE_BYTES)]
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        yield NodeClient(channel)


def refuse_others_socket(path: str) -> None:
    """Who may not write a socket may not connect to it, unix(7); gRPC calls that unreachable. Raises PermissionRefused."""
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionRefused(f"{path} may not be asked by this user; run it as root, with sudo")


@contextlib.contextmanager
def as_shim_errors() -> Iterator[None]:
    """What a call raises becomes the kind and the words that the node sent."""
    try:
        yield
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or "no reason given"
        if code is grpc.StatusCode.UNAVAILABLE and "connect" in details:
            raise Unavailable(
                f"no answer on the CRI socket ({details}); is virtshim running there? It needs root; --socket names another"
            ) from error
        raise _ERRORS[kind_of(code, details)](details) from error
