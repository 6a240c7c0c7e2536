"""Reports steps, which take time, and facts to the meter and the tracer of this process.

As with logging, each process has one global meter and one global tracer. Without them, a step costs almost nothing. Steps and
facts are closed sets, so the number of counters is bounded.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from virtshim.model.container import ExitReason
from virtshim.model.errors import ShimError

OK = "ok"
CRASHED = "crashed"


class Step(enum.Enum):
    """Parts of a pod's start, in order."""

    NETWORK = "network"
    ADMISSION = "admission"
    DEVICES = "devices"
    DISK = "disk"
    SEED = "seed"
    EMPTY_DISKS = "empty_disks"
    DEFINE = "define"
    CGROUP = "cgroup"
    VOLUMES = "volumes"
    LIBVIRT = "libvirt"
    AGENT = "agent"


class WarmStart(enum.Enum):
    """How a container with virtshim.io/warm-start was started: from a template, or why it booted instead."""

    WARM = "warm"
    # templates.max_bytes is 0.
    NOT_ALLOWED = "not_allowed"
    # No template can have such a machine.
    UNSUITABLE = "unsuitable"
    NO_TEMPLATE = "no_template"
    # The container's template could not be made, or was of no use.
    UNFIT = "unfit"
    # The start from the template failed.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Pulled:
    """`result`: OK, CRASHED or an error's kind. `size`: bytes of the image on disk, 0 without an image."""

    result: str
    seconds: float
    size: int


@dataclass(frozen=True, slots=True)
class Exited:
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One comparison of the records with the node."""

    result: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something without an owner was found. `what`: one of the words of `virtshim.recovery`."""

    what: str


@dataclass(frozen=True, slots=True)
class ImagesRemoved:
    """Unused images were removed because their file system filled up."""

    number: int


@dataclass(frozen=True, slots=True)
class WarmStarted:
    how: WarmStart


Fact = Pulled | Exited | Reconciled | Leftover | ImagesRemoved | WarmStarted


class Meter:
    """This one counts nothing; its subclasses count. Called on the thread that does the work, so it must be quick and never
    raise."""

    def took(self, step: Step, result: str, seconds: float) -> None: ...

    def call_took(self, method: str, code: str, seconds: float) -> None:
        """A gRPC call has ended."""

    def calls_under_way(self, change: int) -> None: ...

    def pulls_under_way(self, change: int) -> None: ...

    def tell(self, fact: Fact) -> None: ...

    def spans(self, result: str, number: int) -> None:
        """`result`: sent, refused by the collector, or dropped because too many were waiting."""


class Call(Protocol):
    """The span of one call."""

    trace: str
    """The id of its trace, 32 hex digits; "" if it is not recorded."""

    def ends(self, code: str) -> None: ...


class Tracer(Protocol):
    """Called on the thread that does the work, so it must be quick and never raise."""

    def call(self, name: str, metadata: Metadata, *, begins: bool) -> AbstractContextManager[Call]:
        """The block is an incoming call. `metadata` may name the call's trace; if it does not, a trace is begun if `begins`."""

    def part(self, name: str) -> AbstractContextManager[object]:
        """The block is a part of the current call."""

    def later(self, name: str) -> Callable[[], None]:
        """Begins a part. It ends when the returned function is called, on any thread."""

    def forwarded(self, metadata: Sequence[tuple[str, str | bytes]]) -> Sequence[tuple[str, str | bytes]]:
        """The metadata of an outgoing call that is part of the current call. `metadata`: that of the current call."""

    def close(self) -> None: ...


Metadata = Iterable[tuple[str, str | bytes]]


class NoCall:
    trace = ""

    def ends(self, code: str) -> None: ...


_NO_CALL: Call = NoCall()


class Untraced:
    def call(self, name: str, metadata: Metadata, *, begins: bool) -> AbstractContextManager[Call]:
        del name, metadata, begins
        return contextlib.nullcontext(_NO_CALL)

    def part(self, name: str) -> AbstractContextManager[object]:
        del name
        return contextlib.nullcontext()

    def later(self, name: str) -> Callable[[], None]:
        del name
        return nothing

    def forwarded(self, metadata: Sequence[tuple[str, str | bytes]]) -> Sequence[tuple[str, str | bytes]]:
        return metadata

    def close(self) -> None: ...


def nothing() -> None: ...


_meter = Meter()
_tracer: Tracer = Untraced()


def tracer() -> Tracer:
    return _tracer


@contextlib.contextmanager
def traced_by(other: Tracer) -> Iterator[None]:
    """Makes `other` this process's tracer inside the block."""
    global _tracer  # noqa: PLW0603  as above
    before, _tracer = _tracer, other
    try:
        yield
    finally:
        _tracer = before


def meter() -> Meter:
    return _meter


@contextlib.contextmanager
def measured_by(other: Meter) -> Iterator[None]:
    """Makes `other` this process's meter inside the block."""
    global _meter  # noqa: PLW0603  as a logger's handlers are
    before, _meter = _meter, other
    try:
        yield
    finally:
        _meter = before


@contextlib.contextmanager
def step(which: Step) -> Iterator[None]:
    """The block is the step `which`."""
    began = time.monotonic()
    result = OK
    try:
        with _tracer.part(which.value):
            yield
    except BaseException as exc:
        result = kind_of(exc)
        raise
    finally:
        _meter.took(which, result, time.monotonic() - began)


def kind_of(error: BaseException) -> str:
    """The name of an error as a result."""
    return error.kind.value if isinstance(error, ShimError) else CRASHED
