"""Limits how many places pods or namespaces hold, each of them and all together, and keeps some for holders without any."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from virtshim.model.errors import ResourceExhausted

# Pods whose refusals are counted; beyond this, the oldest count is dropped.
_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Places:
    """`what`: a plural; `each`: the limit of a holder. The remedies are for a holder at its limit, and for a full node."""

    what: str
    total: int
    each: int
    remedy: str
    remedy_of_node: str
    holder: str = "pod"

    @property
    def kept(self) -> int:
        """Places for pods that have none, even if others have all that they may."""
        return self.total // 4


class PodPlaces:
    """Counts the places of pods (`namespace/name`) or namespaces. The holder "" stands for everything without a pod. Any
    thread."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()

    @property
    def allowed(self) -> Places:
        return self._places

    def allow(self, places: Places) -> None:
        """Changes the limits. Holders above them keep their places."""
        with self._lock:
            self._places = places

    def take(self, pod: str) -> None:
        """Raises ResourceExhausted."""
        with self._lock:
            if why := self._full(pod):
                self._refusals[pod] += 1
                if len(self._refusals) > _REMEMBERED:
                    del self._refusals[next(iter(self._refusals))]
                raise ResourceExhausted(why)
            self._held[pod] += 1

    def refusals(self, pod: str) -> int:
        """How often the pod did not get a place."""
        with self._lock:
            return self._refusals.get(pod, 0)

    def give_back(self, pod: str) -> None:
        with self._lock:
            self._held[pod] -= 1
            if self._held[pod] <= 0:
                del self._held[pod]

    @contextmanager
    def held(self, pod: str) -> Iterator[None]:
        """Raises ResourceExhausted."""
        self.take(pod)
        try:
            yield
        finally:
            self.give_back(pod)

    def _full(self, pod: str) -> str:
        of = self._places
        mine, all_held = self._held.get(pod, 0), self._held.total()
        holds = f"{of.holder} {pod} has {mine} {of.what}" if pod else f"there are {mine} {of.what} without a pod"
        if mine >= of.each:
            return f"{holds}, the limit for one {of.holder}; {of.remedy}"
        if all_held >= of.total:
            return f"the {of.holder}s of this node have {all_held} {of.what} together, which is the limit; {of.remedy_of_node}"
        if mine and all_held >= of.total - of.kept:
            return (
                f"{holds}; the last {of.kept} of this node's {of.total} are kept for {of.holder}s that have none; "
                f"{of.remedy_of_node}"
            )
        return ""
