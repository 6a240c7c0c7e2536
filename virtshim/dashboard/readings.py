"""Resource use of pods, computed from two readings of their counters, and its recent history. An unknown value is None, never 0.
Pure."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

_SECOND = 10**9


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows, and the time of the reading in nanoseconds."""

    at: int
    value: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A pod's counters, and its size in bytes and vCPUs, 0 if unknown."""

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
    """CPUs in use, bytes of memory, bytes per second. `at`: seconds since 1970."""

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
    """Computes rates. Remembers the reading of each pod from the last call."""

    _last: dict[str, Reading] = field(default_factory=dict)

    def samples(self, now: float, readings: dict[str, Reading]) -> dict[str, Sample]:
        before, self._last = self._last, dict(readings)
        return {pod: _sample(now, before.get(pod, Reading()), reading) for pod, reading in readings.items()}

    def forget(self) -> None:
        """Call this when nothing was read for a while."""
        self._last = {}


def total(now: float, samples: dict[str, Sample]) -> Sample:
    """The sum for the node. A value that no pod has stays unknown."""
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
    """The rate per second. None if the counter went back, because it then belongs to another VM or a new QEMU."""
    if before is None or after is None or after.at <= before.at or after.value < before.value:
        return None
    return (after.value - before.value) * _SECOND / (after.at - before.at)


# Recent history, so that a new page shows graphs and a timeline at once. It has a fixed size.

# The samples of one graph: of ten minutes, one every two seconds.
SAMPLES: Final = 300
# What graphs can show, in seconds: ten minutes, an hour, a day.
RECENT: Final = 600
SPANS: Final = (RECENT, 3600, 86400)
EVENTS: Final = 1000
# The key of the whole node's graphs. No pod has this id.
NODE: Final = "node"


@dataclass(frozen=True, slots=True)
class Event:
    """`kind`: one word that selects the style, such as started or lost. `at`: seconds since 1970. `pod`: the pod's id, "" for an
    event of the node. `text` comes in part from outside."""

    number: int
    at: float
    kind: str
    pod: str
    text: str


# Of a sample.
_VALUES: Final = 6


class _Kept:
    """The newest samples, in the order of time, packed into a third of their memory."""

    # Time, then the values: NaN for an unknown one.
    _FORM: Final = struct.Struct(f"<d{_VALUES}f")

    def __init__(self, most: int) -> None:
        self._packed: deque[bytes] = deque(maxlen=most)

    def add(self, sample: Sample) -> None:
        self._packed.append(self._FORM.pack(sample.at, *(math.nan if one is None else one for one in sample.values())))

    def newest(self, count: int) -> list[Sample]:
        found = map(self._FORM.unpack, list(self._packed)[-count:])
        return [Sample(at, *(None if math.isnan(one) else one for one in values)) for at, *values in found]


class _Averages:
    """The average of each `step` seconds, at the time of its last sample. Unknown values do not count."""

    def __init__(self, step: float, most: int) -> None:
        self._step = step
        self._kept = _Kept(most)
        self._last: float | None = None
        self._sums, self._counts = [0.0] * _VALUES, [0] * _VALUES

    def add(self, sample: Sample) -> None:
        if self._last is not None and sample.at // self._step != self._last // self._step:
            self._kept.add(self._average(self._last))
            self._sums, self._counts = [0.0] * _VALUES, [0] * _VALUES
        self._last = sample.at
        for column, value in enumerate(sample.values()):
            if value is not None:
                self._sums[column] += value
                self._counts[column] += 1

    def newest(self, count: int) -> list[Sample]:
        kept = self._kept.newest(count)
        return kept if self._last is None else [*kept, self._average(self._last)][-count:]

    def _average(self, at: float) -> Sample:
        return Sample(at, *(sum_ / n if n else None for sum_, n in zip(self._sums, self._counts, strict=True)))


class _History:
    """One pod's samples: as they are, and averages for longer spans."""

    def __init__(self, samples: int) -> None:
        self.recent = _Kept(samples)
        self.averages = {span: _Averages(span / samples, samples) for span in SPANS if span != RECENT}

    def add(self, sample: Sample) -> None:
        self.recent.add(sample)
        for averages in self.averages.values():
            averages.add(sample)


class Graphs:
    """Samples by pod. A pod that is no longer named is forgotten."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._longest = samples
        self._of: dict[str, _History] = {}

    def add(self, samples: dict[str, Sample]) -> None:
        for pod, sample in samples.items():
            if pod not in self._of:
                self._of[pod] = _History(self._longest)
            self._of[pod].add(sample)

    def keep(self, pods: Iterable[str]) -> None:
        wanted = {*pods, NODE}
        for pod in [pod for pod in self._of if pod not in wanted]:
            del self._of[pod]

    def samples(self, pod: str, newest: int = SAMPLES, span: int = RECENT) -> list[Sample]:
        """The newest samples, in the order of time. `span`: one of `SPANS`."""
        history = self._of.get(pod)
        if history is None:
            return []
        return (history.recent if span == RECENT else history.averages[span]).newest(newest)

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
        """The newest events, in the order of arrival."""
        return list(self._events)[-count:]
