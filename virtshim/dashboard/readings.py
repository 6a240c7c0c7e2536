"""What pods use, from two readings of their counters. Pure. What is not known is None, never 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

_SECOND = 10**9


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows, and when it was read: nanoseconds."""

    at: int
    value: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A pod's counters, and what it has: bytes and vCPUs, 0 where that is not known."""

    cpu: Counter | None = None
    memory: int | None = None
    read: Counter | None = None
    written: Counter | None = None
    received: Counter | None = None
    sent: Counter | None = None
    memory_given: int = 0
    vcpus: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """CPUs in use, bytes of memory, bytes a second. `at`: seconds since 1970."""

    at: float
    cpu: float | None = None
    memory: float | None = None
    read: float | None = None
    written: float | None = None
    received: float | None = None
    sent: float | None = None

    def values(self) -> list[float | None]:
        return [self.cpu, self.memory, self.read, self.written, self.received, self.sent]


@dataclass(slots=True)
class Rates:
    """Remembers the last reading of each pod that was in the last call."""

    _last: dict[str, Reading] = field(default_factory=dict)

    def samples(self, now: float, readings: dict[str, Reading]) -> dict[str, Sample]:
        before, self._last = self._last, dict(readings)
        return {pod: _sample(now, before.get(pod, Reading()), reading) for pod, reading in readings.items()}

    def forget(self) -> None:
        """Nothing was read for a while."""
        self._last = {}


def total(now: float, samples: dict[str, Sample]) -> Sample:
    """Of the node: what nobody has stays unknown."""
    columns = list(zip(*(one.values() for one in samples.values()), strict=True))
    sums = [sum(known) if (known := [one for one in column if one is not None]) else None for column in columns]
    return Sample(now, *sums)


def _sample(now: float, before: Reading, after: Reading) -> Sample:
    cpu = _rate(before.cpu, after.cpu)
    return Sample(
        now,
        None if cpu is None else cpu / _SECOND,
        after.memory,
        _rate(before.read, after.read),
        _rate(before.written, after.written),
        _rate(before.received, after.received),
        _rate(before.sent, after.sent),
    )


def _rate(before: Counter | None, after: Counter | None) -> float | None:
    """A second. A smaller number is another VM's, or a new QEMU's."""
    if before is None or after is None or after.at <= before.at or after.value < before.value:
        return None
    return (after.value - before.value) * _SECOND / (after.at - before.at)


# What was seen lately, so that a page that is opened has graphs and a timeline at once. Bounded; no I/O.

# At two seconds each: ten minutes.
SAMPLES: Final = 300
EVENTS: Final = 1000
# The whole node's graphs are kept under this name, which no pod's id is.
NODE: Final = "node"


@dataclass(frozen=True, slots=True)
class Event:
    """`kind`: one word for its looks, such as started or lost. `at`: seconds since 1970. `pod`: its id, "" for the node's own.
    `text` is of others, in part."""

    number: int
    at: float
    kind: str
    pod: str
    text: str


class Graphs:
    """Samples by pod. A pod that is not named any more is forgotten."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._longest = samples
        self._of: dict[str, deque[Sample]] = {}

    def add(self, samples: dict[str, Sample]) -> None:
        for pod, sample in samples.items():
            self._of.setdefault(pod, deque(maxlen=self._longest)).append(sample)

    def keep(self, pods: Iterable[str]) -> None:
        wanted = {*pods, NODE}
        for pod in [pod for pod in self._of if pod not in wanted]:
            del self._of[pod]

    def samples(self, pod: str, newest: int = SAMPLES) -> list[Sample]:
        """In order of time."""
        return list(self._of.get(pod, ()))[-newest:]

    def pods(self) -> list[str]:
        return list(self._of)


class Timeline:
    def __init__(self, events: int = EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=events)
        self._count = 0

    def add(self, at: float, kind: str, pod: str, text: str) -> Event:
        self._count += 1
        event = Event(self._count, at, kind, pod, text)
        self._events.append(event)
        return event

    def newest(self, count: int) -> list[Event]:
        """In the order in which they were seen."""
        return list(self._events)[-count:]
