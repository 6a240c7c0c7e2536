"""What pods use, from two readings of their counters. Pure. What is not known is None, never 0."""

from __future__ import annotations

from dataclasses import dataclass, field

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
