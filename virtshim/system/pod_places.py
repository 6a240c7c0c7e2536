"""So many places on a node for something that pods, or namespaces, hold: fewer for one of them, and some kept for those that have
none."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from virtshim.model.errors import ResourceExhausted

# Pods whose refusals are remembered; of more the one that met a limit first is forgotten.
_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Places:
    """`what` is a plural, `each` the most of one holder. The remedies say what to do when a holder, and when the node has no
    more."""

    what: str
    total: int
    each: int
    remedy: str
    remedy_of_node: str
    holder: str = "pod"

    @property
    def kept(self) -> int:
        """For pods that hold none: however many others hold all they may, each pod's first place is still there."""
        return self.total // 4


class PodPlaces:
    """Who holds how many; pods by `namespace/name`, or namespaces; all without a pod are one holder, "". Any thread."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()

    @property
    def allowed(self) -> Places:
        return self._places

    def allow(self, places: Places) -> None:
        """From now on. Whoever holds more keeps what it has."""
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
        """How often it did not get a place."""
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
            return f"{holds}, the most for one {of.holder}; {of.remedy}"
        if all_held >= of.total:
            return f"the {of.holder}s of this node have {all_held} {of.what} together, the most there may be; {of.remedy_of_node}"
        if mine and all_held >= of.total - of.kept:
            return (
                f"{holds}; the last {of.kept} of this node's {of.total} are kept for {of.holder}s that have none; "
                f"{of.remedy_of_node}"
            )
        return ""
