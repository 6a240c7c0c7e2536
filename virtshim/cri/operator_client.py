"""The client of the admin socket, for virtshim's command line."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from criproto.operator_v1 import operator_pb2, operator_pb2_grpc
from virtshim.cri.channel import as_shim_errors, ask, no_answer, open_channel, refuse_others_socket
from virtshim.guest.operation import Action
from virtshim.model.errors import InvalidRequest, Unavailable

_ADMIN_SECONDS: Final = 60.0
# The node writes a guest's memory in ten minutes, or gives up.
_SAVE_SECONDS: Final = 660.0


@dataclass(frozen=True, slots=True)
class Pulling:
    """A running pull. `received` and `total`: bytes; `total` is 0 while it is unknown."""

    image: str
    received: int
    total: int


@dataclass(frozen=True, slots=True)
class Taken:
    """An operator's action. `at`: seconds since 1970. `pod`: its namespace/name."""

    at: float
    action: str
    vm: str
    pod_id: str
    pod: str
    message: str


@dataclass(frozen=True, slots=True)
class SavedMemory:
    """`taken`: a VM has continued from it. Times in seconds since 1970."""

    bytes: int
    saved_at: float
    lapses_at: float
    taken: bool


@dataclass(frozen=True, slots=True)
class LastingVm:
    """A VM that outlives its pods. `pod`, `pod_id` and `vm_id`: what uses it now, "" if nothing does. `disk`: bytes on the
    node."""

    namespace: str
    name: str
    container: str
    created: float
    disk: int
    pod: str
    pod_id: str
    vm_id: str
    saved: SavedMemory | None
    # The nodes that it has moved to, and that it comes from, "" for none; and whether it waits for the latter's decision.
    moved_to: str = ""
    comes_from: str = ""
    undecided: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}/{self.container}"


def _lasting_vm(one: operator_pb2.LastingVm) -> LastingVm:
    saved = one.saved
    return LastingVm(
        namespace=one.namespace,
        name=one.name,
        container=one.container,
        created=one.created_at / 1e9,
        disk=one.disk_bytes,
        pod=f"{one.pod_namespace}/{one.pod}" if one.pod else "",
        pod_id=one.pod_sandbox_id,
        vm_id=one.container_id,
        saved=SavedMemory(saved.bytes, saved.saved_at / 1e9, saved.lapses_at / 1e9, saved.taken)
        if one.HasField("saved")
        else None,
        moved_to=one.moved_to,
        comes_from=one.comes_from,
        undecided=one.undecided,
    )


class OperatorClient:
    """`vm`: the beginning of a container's or a pod's id."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = operator_pb2_grpc.OperatorStub(channel)

    def act(self, action: Action, vm: str, seconds: int = 0) -> tuple[bool, str]:
        """Whether the action changed anything, and a message about it. `seconds`: for FREEZE only."""
        if action is Action.FREEZE:
            if not 0 <= seconds < 1 << 32:
                raise InvalidRequest(f"--seconds {seconds}: must be a number of seconds")
            answer = ask(self._stub.Freeze, operator_pb2.FreezeRequest(id=vm, seconds=seconds), _ADMIN_SECONDS)
        else:
            call = getattr(self._stub, action.value.capitalize())
            limit = _SAVE_SECONDS if action in (Action.SAVE, Action.RENEW) else _ADMIN_SECONDS
            answer = ask(call, operator_pb2.VmRequest(id=vm), limit)
        return answer.changed, answer.message

    def save_all(self, seconds: int) -> Mapping[str, str]:
        """Saves the VMs whose stops save. Returns, by NAMESPACE/NAME/CONTAINER, "" or why the guest runs on."""
        if not 1 <= seconds < 1 << 31:
            raise InvalidRequest(f"--seconds {seconds}: must be a number of seconds, at least 1")
        limit = seconds + _ADMIN_SECONDS
        answer = ask(self._stub.SaveAll, operator_pb2.SaveAllRequest(seconds=seconds), limit)
        return {one.vm: one.error for one in answer.results}

    def inspect(self, vm: str) -> dict[str, Any]:
        answer = ask(self._stub.Inspect, operator_pb2.InspectRequest(id=vm), _ADMIN_SECONDS)
        found: dict[str, Any] = json.loads(answer.json)
        return found

    def definition(self, vm: str) -> str:
        return ask(self._stub.DumpXml, operator_pb2.VmRequest(id=vm), _ADMIN_SECONDS).xml

    def screenshot(self, vm: str) -> bytes:
        return ask(self._stub.Screenshot, operator_pb2.VmRequest(id=vm), _ADMIN_SECONDS).png

    def screen_url(self, vm: str) -> str:
        return ask(self._stub.OpenScreen, operator_pb2.VmRequest(id=vm), _ADMIN_SECONDS).url

    def pulls(self) -> Sequence[Pulling]:
        found = ask(self._stub.Pulls, operator_pb2.PullsRequest(), _ADMIN_SECONDS).pulls
        return [Pulling(one.image, one.received, one.total) for one in found]

    def load(self, name: str, total: int, chunks: Iterator[bytes]) -> str:
        """Sends a disk of `total` bytes (0: unknown) to the node, which stores it as image `name`. Returns the image's id."""

        def messages() -> Iterator[operator_pb2.LoadImageRequest]:
            yield operator_pb2.LoadImageRequest(name=name, total=total)
            for chunk in chunks:
                yield operator_pb2.LoadImageRequest(data=chunk)
            yield operator_pb2.LoadImageRequest(is_last=True)

        with as_shim_errors():
            return self._stub.LoadImage(messages()).id

    def lasting_vms(self) -> Sequence[LastingVm]:
        found = ask(self._stub.Vms, operator_pb2.VmsRequest(), _ADMIN_SECONDS).vms
        return [_lasting_vm(one) for one in found]

    def remove_vm(self, vm: LastingVm) -> str:
        """Returns a message about the result."""
        request = operator_pb2.RemoveVmRequest(namespace=vm.namespace, name=vm.name, container=vm.container)
        return ask(self._stub.RemoveVm, request, _ADMIN_SECONDS).message

    def take_vm(self, vm: LastingVm) -> str:
        """Returns a message about the result."""
        request = operator_pb2.TakeVmRequest(namespace=vm.namespace, name=vm.name, container=vm.container)
        return ask(self._stub.TakeVm, request, _ADMIN_SECONDS).message

    def start_ups(self, vm: str = "") -> Sequence[operator_pb2.StartUp]:
        """`vm`: "" for all."""
        return list(ask(self._stub.StartUps, operator_pb2.StartUpsRequest(id=vm), _ADMIN_SECONDS).start_ups)

    def actions(self, since: float = 0.0, *, follow: bool = True) -> Iterator[Taken]:
        """The actions after `since`; if `follow`, then each new one when it happens."""
        request = operator_pb2.FollowActionsRequest(since=int(since * 1e9), remembered_only=not follow)
        with as_shim_errors():
            for one in self._stub.FollowActions(request):
                pod = f"{one.namespace}/{one.pod}"
                yield Taken(one.at / 1e9, one.action, one.container_id, one.pod_sandbox_id, pod, one.message)


@contextlib.contextmanager
def operating(path: str) -> Iterator[OperatorClient]:
    """Yields a client of this admin socket. Raises Unavailable if the socket does not exist, PermissionRefused if this user may
    not use it."""
    if not os.path.exists(path):
        raise Unavailable(
            f"there is no admin socket {path}: is virtshim running? virtshim makes it in paths.run_dir, beside its CRI socket"
        )
    refuse_others_socket(path)
    with open_channel(path) as channel:
        yield OperatorClient(channel)


@contextlib.contextmanager
def operating_beside(socket: str, admin: str) -> Iterator[OperatorClient]:
    """Errors name the CRI socket, because `--socket` names it. Raises PermissionRefused, Unavailable."""
    refuse_others_socket(socket)
    if not os.path.exists(socket):
        raise no_answer(socket, os.strerror(errno.ENOENT))
    with operating(admin) as operator:
        yield operator
