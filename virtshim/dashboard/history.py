"""What was seen lately, so that a page that is opened has graphs and a timeline at once. Bounded; no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from virtshim.dashboard.readings import Sample

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

    def of(self, pod: str, newest: int = SAMPLES) -> list[Sample]:
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
