"""The client of the admin socket, for virtshim's command line and others of root's programs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from criproto.operator_v1 import operator_pb2 as pb
from criproto.operator_v1 import operator_pb2_grpc
from virtshim.cri.client import as_shim_errors, refuse_others_socket
from virtshim.guest.operation import Action
from virtshim.model.errors import InvalidRequest, Unavailable

_SECONDS: Final = 60.0
_MESSAGE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Pulling:
    """Bytes; `total` 0 while that is not known."""

    image: str
    received: int
    total: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What an operator has done; `at` in seconds since 1970."""

    at: float
    action: str
    vm: str
    pod: str
    message: str


class OperatorClient:
    """`vm` is the beginning of a container's or a pod's id. Calls raise ShimError, with the node's kind and message."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = operator_pb2_grpc.OperatorStub(channel)

    def act(self, action: Action, vm: str, seconds: int = 0) -> tuple[bool, str]:
        """Whether it changed anything, and what came of it. `seconds` counts for FREEZE."""
        with as_shim_errors():
            if action is Action.FREEZE:
                if not 0 <= seconds < 1 << 32:
                    raise InvalidRequest(f"--seconds {seconds}: must be a number of seconds")
                answer = self._stub.Freeze(pb.FreezeRequest(id=vm, seconds=seconds), timeout=_SECONDS)
            else:
                call = getattr(self._stub, action.value.capitalize())
                answer = call(pb.VmRequest(id=vm), timeout=_SECONDS)
        return answer.changed, answer.message

    def inspect(self, vm: str) -> dict[str, Any]:
        with as_shim_errors():
            found: dict[str, Any] = json.loads(self._stub.Inspect(pb.InspectRequest(id=vm), timeout=_SECONDS).json)
        return found

    def definition(self, vm: str) -> str:
        with as_shim_errors():
            return self._stub.DumpXml(pb.VmRequest(id=vm), timeout=_SECONDS).xml

    def screenshot(self, vm: str) -> bytes:
        with as_shim_errors():
            return self._stub.Screenshot(pb.VmRequest(id=vm), timeout=_SECONDS).png

    def screen_url(self, vm: str) -> str:
        with as_shim_errors():
            return self._stub.OpenScreen(pb.VmRequest(id=vm), timeout=_SECONDS).url

    def pulls(self) -> Sequence[Pulling]:
        with as_shim_errors():
            found = self._stub.Pulls(pb.PullsRequest(), timeout=_SECONDS).pulls
        return [Pulling(one.image, one.received, one.total) for one in found]

    def start_ups(self, vm: str = "") -> Sequence[pb.StartUp]:
        """ "" for all."""
        with as_shim_errors():
            return list(self._stub.StartUps(pb.StartUpsRequest(id=vm), timeout=_SECONDS).start_ups)

    def actions(self, since: float = 0.0, *, follow: bool = True) -> Iterator[Taken]:
        """Those after that time; and then each as it happens, if `follow`."""
        request = pb.FollowActionsRequest(since=int(since * 1e9), remembered_only=not follow)
        with as_shim_errors():
            for one in self._stub.FollowActions(request):
                yield Taken(one.at / 1e9, one.action, one.container_id, f"{one.namespace}/{one.pod}", one.message)


@contextlib.contextmanager
def operating(path: str) -> Iterator[OperatorClient]:
    """A client of the node whose admin socket this is. Raises Unavailable if there is none, PermissionRefused if it is
    another's."""
    if not os.path.exists(path):
        raise Unavailable(
            f"there is no admin socket {path}: is virtshim running there? It lies in paths.run_dir, or beside the socket that "
            "--socket names"
        )
    refuse_others_socket(path)
    options = [("grpc.max_receive_message_length", _MESSAGE_BYTES)]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        yield OperatorClient(channel)
