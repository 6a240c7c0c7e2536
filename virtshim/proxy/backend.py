"""One runtime behind the proxy: its connection, whether it answers, calls to it as bytes.

gRPC connects again by itself, with back-off. What is added here: a runtime that cannot be reached, or that does not answer a call
that others wait for, is down until it has answered a Version; until then calls to it fail at once.
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

if TYPE_CHECKING:
    # The stubs make these generic for the checker only.
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
    # A runtime's error message may be long, and comes as metadata.
    ("grpc.max_metadata_size", 64 << 10),
    # A connection of its own: two runtimes never share one, whatever their sockets.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # How long a connect may take: a stopped process has its socket's queue accept it, and says nothing.
    ("grpc.min_reconnect_backoff_ms", 5000),
)

_VERSION: Final = "/runtime.v1.RuntimeService/Version"
_ASK: Final = pb.VersionRequest(version="0.1.0").SerializeToString()
_ASK_LIMIT: Final = 5.0
_ASK_INTERVAL: Final = 0.2
# Of the time that the caller has.
_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    initial: Metadata = ()
    trailing: Metadata = ()


@dataclass(slots=True)
class Told:
    """The metadata of an answer that comes in pieces."""

    initial: Metadata = ()
    trailing: Metadata = ()


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an answer is waited for that others are merged with."""

    seconds: float
    is_full: bool = True
    """Whoever takes longer is down; otherwise it was the caller who had no more time for it."""

    @classmethod
    def within(cls, seconds: float, remaining: float | None, *, is_full: bool = True) -> Patience:
        """The caller is to have its answer before it gives up."""
        if remaining is None or remaining * _SHARE >= seconds:
            return cls(seconds, is_full)
        return cls(remaining * _SHARE, is_full=False)


class CallFailed(Exception):
    """What a runtime answered instead, or what is said in its place: passed on as it is."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata = (), *, is_down: bool = False) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = trailing
        self.is_down = is_down
        """The runtime did not answer: it cannot be reached, or is silent."""


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

    async def ask(self, method: str, request: bytes, patience: Patience, metadata: Metadata = ()) -> bytes:
        """For calls whose answer others wait for: silence is being down. Raises CallFailed."""
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
        """What it streams. Raises CallFailed."""
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
        self, method: str, requests: AsyncIterator[bytes], remaining: float | None, metadata: Metadata, told: Told
    ) -> AsyncGenerator[bytes, None]:
        """What it answers to a stream of requests, for methods of any shape: a single message is such a stream, too. `told` gets
        its metadata. Raises CallFailed."""
        self.refuse_if_down()
        ready: _StreamStream = self._channel.stream_stream(method)
        with self._measured(OTHER):
            call = ready(requests, timeout=remaining, metadata=tuple(metadata))
            try:
                told.initial = _pairs(await call.initial_metadata())
                async for message in call:
                    yield message
                told.trailing = _pairs(await call.trailing_metadata())
            except aio.AioRpcError as exc:
                raise self._failed(exc) from None
            finally:
                call.cancel()

    @contextlib.contextmanager
    def _measured(self, method: str) -> Iterator[None]:
        """The block is one call of it."""
        began, code = time.monotonic(), grpc.StatusCode.OK
        try:
            yield
        except CallFailed as failed:
            code = failed.code
            raise
        except BaseException:  # given up by its caller
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._meter.runtime_took(self.name, short(method), code.name, time.monotonic() - began)

    def silent(self, seconds: float) -> CallFailed:
        """It has left a call unanswered for that long: it is down, and this is what is said of it."""
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
        """A runtime's own UNAVAILABLE is passed on as any other; that of a lost connection says who is lost."""
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
        version: _UnaryUnary = self._channel.unary_unary(_VERSION)
        while True:
            # It may have gone while its answer to another call came.
            await asyncio.sleep(_ASK_INTERVAL)
            with contextlib.suppress(aio.AioRpcError):
                await version(_ASK, timeout=_ASK_LIMIT, wait_for_ready=True)
                break
        self._why_down = ""
        self._back.set()
        log.info("proxy.runtime.back", runtime=self.name)


def _pairs(metadata: aio.Metadata | None) -> Metadata:
    return [(key, value) for key, value in metadata or ()]


# One call that has come in, and all runtimes asked the same.

Outcome = bytes | CallFailed


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    request: bytes
    remaining: float | None
    """Seconds until the caller gives up; None: never."""
    metadata: Metadata = ()


async def ask_all(backends: Sequence[Backend], asked: Asked, seconds: float, *, is_full: bool = True) -> list[Outcome]:
    """The answers in the order of `backends`; none takes longer than `seconds`, or than its caller has time. `is_full`: whoever
    takes as long as that is down."""
    patience = Patience.within(seconds, asked.remaining, is_full=is_full)
    return await asyncio.gather(*(_ask(backend, asked, patience) for backend in backends))


async def _ask(backend: Backend, asked: Asked, patience: Patience) -> Outcome:
    try:
        return await backend.ask(asked.method, asked.request, patience, asked.metadata)
    except CallFailed as failed:
        return failed
