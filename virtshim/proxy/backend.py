"""One runtime behind the proxy: its connection, whether it answers, calls to it as bytes.

gRPC reconnects by itself, with back-off. In addition, a runtime is down if it cannot be reached, or does not answer a call whose
answer is merged with others'. Calls to it then fail at once, until it has answered a Version.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc
import structlog
from grpc import aio

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.proxy.measuring import OTHER, ProxyMeter, short, waiting
from virtshim.proxy.routes import Runtime
from virtshim.proxy.wire import VERSION

if TYPE_CHECKING:
    # Generic only in the stubs.
    _UnaryUnary = aio.UnaryUnaryMultiCallable[bytes, bytes]
    _UnaryStream = aio.UnaryStreamMultiCallable[bytes, bytes]
    _StreamStream = aio.StreamStreamMultiCallable[bytes, bytes]

log = structlog.get_logger(__name__)

Metadata = Sequence[tuple[str, str | bytes]]

# kubelet's and containerd's limit.
MESSAGE_BYTES: Final = 16 << 20

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # A runtime's error message arrives as metadata, and may be long.
    ("grpc.max_metadata_size", 64 << 10),
    # Two runtimes never share a connection, even with the same socket.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The time limit for connecting: the socket of a stopped process accepts connections, but nothing answers.
    ("grpc.min_reconnect_backoff_ms", 5000),
)

_ASK: Final = pb.VersionRequest(version="0.1.0").SerializeToString()
_ASK_LIMIT: Final = 5.0
_ASK_INTERVAL: Final = 0.2
# The share of the caller's remaining time that a runtime gets.
_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    initial: Metadata = ()
    trailing: Metadata = ()


@dataclass(slots=True)
class StreamMetadata:
    """The metadata of a streamed answer."""

    initial: Metadata = ()
    trailing: Metadata = ()


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for an answer that is merged with others'."""

    seconds: float
    is_full: bool = True
    """A runtime that takes longer is down; otherwise the caller's own time was over."""

    @classmethod
    def within(cls, seconds: float, remaining: float | None, *, is_full: bool = True) -> Patience:
        """Leaves time to answer the caller before it gives up."""
        if remaining is None or remaining * _SHARE >= seconds:
            return cls(seconds, is_full)
        return cls(remaining * _SHARE, is_full=False)


class CallFailed(Exception):
    """An error of a runtime, or one on its behalf; passed on unchanged."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata = (), *, is_down: bool = False) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = trailing
        self.is_down = is_down
        """The runtime cannot be reached, or does not answer."""


class Backend:
    def __init__(self, runtime: Runtime, meter: ProxyMeter) -> None:
        self.runtime = runtime
        self._meter = meter
        self._channel = aio.insecure_channel(f"unix:{runtime.socket}", options=_OPTIONS)
        self._why_down = ""
        self._back = asyncio.Event()
        self._back.set()
        self._asking: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.runtime.name

    async def close(self) -> None:
        if self._asking:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking
        await self._channel.close()

    async def call(
        self, method: str, request: bytes, remaining: float | None = None, metadata: Metadata = ()
    ) -> Answer:
        """`remaining`: seconds until the caller gives up. Raises CallFailed."""
        self.refuse_if_down()
        ready: _UnaryUnary = self._channel.unary_unary(method)
        with self._measured(method), waiting():
            call = ready(request, timeout=remaining, metadata=tuple(metadata))
            try:
                body = await call
            except aio.AioRpcError as exc:
                raise self._failed(exc) from None
        return Answer(body, _pairs(await call.initial_metadata()), _pairs(await call.trailing_metadata()))

    async def pass_on(self, asked: Asked) -> Answer:
        """Makes the caller's own call. Raises CallFailed."""
        return await self.call(asked.method, asked.request, asked.remaining, asked.metadata)

    async def ask(self, method: str, request: bytes, patience: Patience, metadata: Metadata = ()) -> bytes:
        """For calls whose answers are merged. A runtime that does not answer is down. Raises CallFailed."""
        try:
            return (await self.call(method, request, patience.seconds, metadata)).body
        except CallFailed as failed:
            if failed.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            if patience.is_full:
                raise self.silent(patience.seconds) from None
            raise self._unavailable(f"no answer within {patience.seconds:.1f} s") from None

    async def read(
        self, method: str, request: bytes, remaining: float | None, metadata: Metadata = ()
    ) -> AsyncGenerator[bytes, None]:
        """Yields a streamed answer. Raises CallFailed."""
        self.refuse_if_down()
        ready: _UnaryStream = self._channel.unary_stream(method)
        with self._measured(method):
            call = ready(request, timeout=remaining, metadata=tuple(metadata))
            try:
                async for message in call:
                    yield message
            except aio.AioRpcError as exc:
                raise self._failed(exc) from None
            finally:
                call.cancel()

    async def converse(
        self,
        method: str,
        requests: AsyncIterator[bytes],
        remaining: float | None,
        metadata: Metadata,
        metadata_out: StreamMetadata,
    ) -> AsyncGenerator[bytes, None]:
        """Yields the answers to a stream of requests. Suits every method, because a single message is a stream too.
        `metadata_out` gets the answer's metadata. Raises CallFailed."""
        self.refuse_if_down()
        ready: _StreamStream = self._channel.stream_stream(method)
        with self._measured(OTHER):
            call = ready(requests, timeout=remaining, metadata=tuple(metadata))
            try:
                metadata_out.initial = _pairs(await call.initial_metadata())
                async for message in call:
                    yield message
                metadata_out.trailing = _pairs(await call.trailing_metadata())
            except aio.AioRpcError as exc:
                raise self._failed(exc) from None
            finally:
                call.cancel()

    @contextlib.contextmanager
    def _measured(self, method: str) -> Iterator[None]:
        """Measures the block as one call."""
        began, code = time.monotonic(), grpc.StatusCode.OK
        try:
            yield
        except CallFailed as failed:
            code = failed.code
            raise
        except BaseException:  # the caller has given up
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._meter.runtime_took(self.name, short(method), code.name, time.monotonic() - began)

    def silent(self, seconds: float) -> CallFailed:
        """Marks the runtime as down, because it left a call unanswered for that long. Returns the error to raise."""
        why = f"no answer within {seconds:.1f} s"
        self._mark_down(why)
        return self._unavailable(why)

    @property
    def is_down(self) -> bool:
        return bool(self._why_down)

    async def wait_until_back(self) -> None:
        await self._back.wait()

    def refuse_if_down(self) -> None:
        """Raises CallFailed."""
        if self._why_down:
            raise self._unavailable(self._why_down)

    def _failed(self, error: aio.AioRpcError) -> CallFailed:
        """Passes on a runtime's own UNAVAILABLE; for a lost connection, the error names the runtime."""
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE and not self._is_connected():
            self._mark_down(details)
            return self._unavailable(details)
        return CallFailed(error.code(), details, _pairs(error.trailing_metadata()))

    def _is_connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def _unavailable(self, why: str) -> CallFailed:
        message = f"the runtime {self.name} at {self.runtime.socket} is not available: {why}"
        return CallFailed(grpc.StatusCode.UNAVAILABLE, message, is_down=True)

    def _mark_down(self, why: str) -> None:
        if not self._why_down:
            log.warning("proxy.runtime.down", runtime=self.name, socket=self.runtime.socket, why=why)
            self._back.clear()
            self._asking = asyncio.create_task(self._ask_until_back())
        self._why_down = why or "the connection was lost"

    async def _ask_until_back(self) -> None:
        version: _UnaryUnary = self._channel.unary_unary(VERSION)
        while True:
            # The runtime may have gone while it answered another call.
            await asyncio.sleep(_ASK_INTERVAL)
            with contextlib.suppress(aio.AioRpcError):
                await version(_ASK, timeout=_ASK_LIMIT, wait_for_ready=True)
                break
        self._why_down = ""
        self._back.set()
        log.info("proxy.runtime.back", runtime=self.name)


def _pairs(metadata: aio.Metadata | None) -> Metadata:
    return [(key, value) for key, value in metadata or ()]


# A call that has come in, and the same question to all runtimes.

Outcome = bytes | CallFailed


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    request: bytes
    remaining: float | None
    """Seconds until the caller gives up; None: never."""
    metadata: Metadata = ()


async def ask_all(backends: Sequence[Backend], asked: Asked, seconds: float, *, is_full: bool = True) -> list[Outcome]:
    """The answers in the order of `backends`. None takes longer than `seconds` or the caller's time. `is_full`: a runtime
    that takes `seconds` is down."""
    patience = Patience.within(seconds, asked.remaining, is_full=is_full)
    return await asyncio.gather(*(_ask(backend, asked, patience) for backend in backends))


async def _ask(backend: Backend, asked: Asked, patience: Patience) -> Outcome:
    try:
        return await backend.ask(asked.method, asked.request, patience, asked.metadata)
    except CallFailed as failed:
        return failed
