"""GetContainerEvents: one stream for each client that follows."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import to_proto
from virtshim.cri.services import ServicerPart, Services


class EventCalls(ServicerPart):
    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._broadcaster = services.events

    def GetContainerEvents(
        self, request: pb.GetEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ContainerEventResponse]:
        """The initial metadata says that from here on nothing is missed. A client that fell behind and reads nothing at all is
        cut off after its grace: until it reads, its thread waits in the middle of a message."""
        del request
        cut = threading.Timer(self._broadcaster.grace, context.cancel)
        cut.daemon = True
        subscription = self._broadcaster.subscribe(on_drop=cut.start)
        try:
            if not context.add_callback(subscription.close):
                return  # the client has gone already
            context.send_initial_metadata(())
            while (change := subscription.next()) is not None:
                yield to_proto.event(change)
        finally:
            cut.cancel()
            subscription.close()

    def end_streams(self) -> None:
        """The server stops: nobody waits for streams that never end by themselves."""
        self._broadcaster.close()
