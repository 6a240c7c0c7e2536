"""What this process does, told to whoever measures it: steps, which take time, and facts.

As with a log, there is one listener a process, and nobody is handed it; without one a step costs a look at a variable. What is
told is a closed set, so that whoever counts by it has a bounded number of counters.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from virtshim.model.container import ExitReason
from virtshim.model.errors import ShimError

OK = "ok"
CRASHED = "crashed"


class Step(enum.Enum):
    """Parts of a pod's start, in their order."""

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


@dataclass(frozen=True, slots=True)
class Pulled:
    """`result` is OK, CRASHED or an error's kind; `size` of the image on disk, 0 if there is none."""

    result: str
    seconds: float
    size: int


@dataclass(frozen=True, slots=True)
class Exited:
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One comparison of records and world."""

    result: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something was there that nobody owns. `what` is one of the repairs' own words."""

    what: str


@dataclass(frozen=True, slots=True)
class ImagesRemoved:
    """Unused ones, from a file system that has filled up."""

    number: int


Fact = Pulled | Exited | Reconciled | Leftover | ImagesRemoved


class Meter(Protocol):
    """Called on the thread that does the work: quick, and never raises."""

    def took(self, step: Step, result: str, seconds: float) -> None: ...

    def call_took(self, method: str, code: str, seconds: float) -> None:
        """A call of gRPC's has ended."""

    def calls_under_way(self, change: int) -> None: ...

    def pulls_under_way(self, change: int) -> None: ...

    def tell(self, fact: Fact) -> None: ...

    def spans(self, result: str, number: int) -> None:
        """Of traces: sent, refused by the collector, or dropped because too many waited."""


class Call(Protocol):
    """The span of one call."""

    trace: str
    """Which trace it belongs to, as 32 hex digits; "" if nobody records it."""

    def ends(self, code: str) -> None: ...


class Tracer(Protocol):
    """Called on the thread that does the work: quick, and never raises."""

    def call(self, name: str, metadata: Metadata, *, begins: bool) -> AbstractContextManager[Call]:
        """A call that has come in; what happens inside the block is part of it. `metadata` may name the trace that it belongs to;
        where it does not, one is begun if `begins` is set."""

    def part(self, name: str) -> AbstractContextManager[object]:
        """Something that a call does."""

    def later(self, name: str) -> Callable[[], None]:
        """Begins a part that ends when what is returned is called, on whichever thread."""


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
        return _nothing


def _nothing() -> None: ...


class _Nobody:
    def took(self, step: Step, result: str, seconds: float) -> None: ...

    def call_took(self, method: str, code: str, seconds: float) -> None: ...

    def calls_under_way(self, change: int) -> None: ...

    def pulls_under_way(self, change: int) -> None: ...

    def tell(self, fact: Fact) -> None: ...

    def spans(self, result: str, number: int) -> None: ...


_meter: Meter = _Nobody()
_tracer: Tracer = Untraced()


def tracer() -> Tracer:
    """Whoever records traces now."""
    return _tracer


@contextlib.contextmanager
def traced_by(other: Tracer) -> Iterator[None]:
    """Inside the block it records what happens in this process."""
    global _tracer  # noqa: PLW0603  as above
    before, _tracer = _tracer, other
    try:
        yield
    finally:
        _tracer = before


def meter() -> Meter:
    """Whoever counts now."""
    return _meter


@contextlib.contextmanager
def measured_by(other: Meter) -> Iterator[None]:
    """Inside the block it is told of all that happens in this process."""
    global _meter  # noqa: PLW0603  as a log's handlers are
    before, _meter = _meter, other
    try:
        yield
    finally:
        _meter = before


@contextlib.contextmanager
def step(which: Step) -> Iterator[None]:
    """The block is that step."""
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
    """As a result is named."""
    return error.kind.value if isinstance(error, ShimError) else CRASHED
