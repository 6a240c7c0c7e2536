"""The streaming server: its thread with an event loop, and its listening socket on loopback."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

import structlog

from virtshim.model.errors import InternalError, WrongState
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.streaming.connection import KINDS, ConnectionHandler, StreamTimeouts, Tokens
from virtshim.streaming.ports import Attaches, Execs, Screens, StreamRequest, owner
from virtshim.streaming.room import StreamLimits, StreamRoom
from virtshim.system.clock import Clock

log = structlog.get_logger(__name__)

# Seconds until the next attempt after a failed accept.
_RETRY_PAUSE: Final = 1.0


class ConnectionListener:
    """Accepts connections inside its `async with`, and then closes the listener. `on_connection` owns each new socket. Closing
    asyncio's own server would lose connections that it is just accepting."""

    def __init__(self, listener: socket.socket, on_connection: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._listener.setblocking(False)
        self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _open(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # no descriptors left; clients wait until there are some again
            log.warning("streaming.accept.failed", error=str(exc))
            self._loop.remove_reader(self._listener)
            self._again = self._loop.call_later(_RETRY_PAUSE, self._open)
            return
        sock.setblocking(False)
        self._on_connection(sock)


_BACKLOG: Final = 128
_START: Final = 10.0


class StreamingServer:
    """Implements `virtshim.streaming.ports.Streaming`."""

    def __init__(
        self,
        address: str,
        port: int,
        clock: Clock,
        timeouts: StreamTimeouts | None = None,
        limits: StreamLimits | None = None,
    ) -> None:
        """`port`: 0 lets the kernel choose. Nothing happens before `start`."""
        self._address = address
        self._port = port
        self._timeouts = timeouts or StreamTimeouts()
        self._room = StreamRoom(limits or StreamLimits())
        self._tokens = Tokens(clock.monotonic)
        self._handler: ConnectionHandler | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._base = ""

    # --- life

    def allow(self, limits: StreamLimits) -> None:
        """Changes the limits for new sessions. Existing sessions continue."""
        self._room.allow(limits)

    def start(self, attaches: Attaches, execs: Execs, screens: Screens) -> None:
        """Raises WrongState if the address cannot be listened on."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._address, self._port))
            listener.listen(_BACKLOG)
        except OSError as exc:
            listener.close()
            raise WrongState(
                f"streaming: cannot listen on {self._address} port {self._port}: {exc.strerror}; "
                "set streaming.port to a free one, or to 0"
            ) from exc
        host = f"[{self._address}]" if family == socket.AF_INET6 else self._address
        self._base = f"http://{host}:{listener.getsockname()[1]}"
        handler = ConnectionHandler(self._tokens, attaches, execs, screens, self._timeouts, self._room)
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(handler, listener, started), name="streaming", daemon=True
        )
        self._thread.start()
        self._loop = started.result(timeout=_START)
        self._handler = handler
        log.info("streaming.serving", url=self._base)

    @staticmethod
    def _run(
        handler: ConnectionHandler,
        listener: socket.socket,
        started: concurrent.futures.Future[asyncio.AbstractEventLoop],
    ) -> None:
        async def main() -> None:
            started.set_result(asyncio.get_running_loop())
            async with ConnectionListener(listener, handler.connected):
                await handler.closing.wait()
            await handler.end_sessions()

        try:
            asyncio.run(main())
        except BaseException as exc:
            if started.done():
                log.exception("streaming.crashed")
            else:
                started.set_exception(exc)

    def stop(self) -> None:
        """Asks sessions to end, and cuts them off after a few seconds. May be called twice."""
        if self._handler is None or self._thread is None:
            return
        self._call(self._handler.closing.set)
        self._thread.join()

    # --- virtshim.streaming.ports.Streaming

    def offer(self, request: StreamRequest) -> str:
        if self._handler is None:
            raise InternalError("the streaming server does not run")
        return f"{self._base}/{KINDS[type(request)]}/{self._tokens.issue(request)}"

    def refused(self, pod: str) -> Mapping[str, int]:
        return {
            "urls": self._tokens.places.refusals(pod),
            "sessions": self._room.sessions.refusals(pod),
            "connections": self._room.connections.refusals(pod),
        }

    def end_container(self, container: ContainerId) -> None:
        self._end(container)

    def end_sandbox(self, sandbox: SandboxId) -> None:
        self._end(sandbox)

    def _end(self, whose: ContainerId | SandboxId) -> None:
        self._tokens.revoke(lambda request: owner(request) == whose)
        if self._handler is not None:
            self._call(self._handler.end, whose)

    def _call(self, what: Callable[..., object], *args: object) -> None:
        """Calls `what` on the event loop. Does nothing if the loop has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(what, *args)
