"""So many places on a node for something that pods hold: fewer for one pod, and some kept for those that have none."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from virtshim.domain.errors import ResourceExhausted

# Pod, and what it was refused.
Refused = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Places:
    """`what` is a plural, `each` the most of one pod. The remedies say what to do when a pod, and when the node has no more."""

    what: str
    total: int
    each: int
    remedy: str
    remedy_of_node: str

    @property
    def kept(self) -> int:
        """For pods that hold none: however many others hold all they may, each pod's first place is still there."""
        return self.total // 4


class PodPlaces:
    """Who holds how many; pods by `namespace/name`. Any thread."""

    def __init__(self, places: Places, refused: Refused = lambda _pod, _what: None) -> None:
        self._places = places
        self._refused = refused
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def take(self, pod: str) -> None:
        """Raises ResourceExhausted."""
        with self._lock:
            why = self._full(pod)
            if not why:
                self._held[pod] += 1
                return
        self._refused(pod, self._places.what)
        raise ResourceExhausted(why)

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
        if mine >= of.each:
            return f"pod {pod} has {mine} {of.what}, the most for one pod; {of.remedy}"
        if all_held >= of.total:
            return (
                f"the pods of this node have {all_held} {of.what} together, the most there may be; {of.remedy_of_node}"
            )
        if mine and all_held >= of.total - of.kept:
            return (
                f"pod {pod} has {mine} {of.what}; the last {of.kept} of this node's {of.total} are kept for pods that have "
                f"none; {of.remedy_of_node}"
            )
        return ""
