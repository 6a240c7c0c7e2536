"""The service for virtshim's own commands, beside CRI on the same socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import grpc
import structlog

from criproto.admin_v1 import admin_pb2, admin_pb2_grpc
from virtshim.domain.errors import InvalidRequest, WrongState
from virtshim.domain.guest.login import check_user, parse_keys
from virtshim.domain.guest.streaming import AttachStreams, Streams
from virtshim.ports.guests import GuestOperations
from virtshim.primitives.existing import pod_of
from virtshim.queries.lookup import get_running_container

if TYPE_CHECKING:
    from virtshim.ports.records import Records
    from virtshim.ports.streaming import Streaming

log = structlog.get_logger(__name__)

_SECONDS: Final = 30.0
_MAX_KEYS: Final = 100


class AdminServicer(admin_pb2_grpc.AdminServicer):
    def __init__(self, records: Records, guests: GuestOperations, streaming: Streaming) -> None:
        self._records = records
        self._guests = guests
        self._streaming = streaming

    def AddSshKeys(
        self, request: admin_pb2.AddSshKeysRequest, context: grpc.ServicerContext
    ) -> admin_pb2.AddSshKeysResponse:
        del context
        check_user(request.user)
        keys = parse_keys("\n".join(request.keys))
        if not 1 <= len(keys) <= _MAX_KEYS:
            raise InvalidRequest(f"{len(keys)} SSH keys: give 1 to {_MAX_KEYS}")
        container = get_running_container(self._records, request.container_id)
        self._guests.add_ssh_keys(container.id, request.user, keys, _SECONDS)
        log.info("guest.ssh_keys.added", container=container.id.short, user=request.user, keys=len(keys))
        return admin_pb2.AddSshKeysResponse()

    def AttachConsole(
        self, request: admin_pb2.AttachConsoleRequest, context: grpc.ServicerContext
    ) -> admin_pb2.AttachConsoleResponse:
        del context
        container = get_running_container(self._records, request.container_id)
        config = container.config
        if request.stdin and not config.stdin:
            raise WrongState(f"container {container.id.short} was created without stdin; set stdin in its spec to type")
        streams = Streams(stdin=request.stdin, stdout=True, tty=True)
        wanted = AttachStreams(container.id, streams, config.stdin_once, pod=pod_of(self._records, container))
        return admin_pb2.AttachConsoleResponse(url=self._streaming.offer(wanted))
