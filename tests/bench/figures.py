"""Samples and their statistics."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable


class Figures:
    """Samples by key; a ratio is taken pair by pair, because the machine's speed drifts."""

    def __init__(self) -> None:
        self._samples: dict[str, tuple[str, list[float]]] = {}

    def add(self, key: str, value: float, unit: str) -> None:
        self._samples.setdefault(key, (unit, []))[1].append(value)

    def take(self, other: Figures) -> None:
        """Adds the samples of `other`."""
        for key, (unit, values) in other._samples.items():
            for value in values:
                self.add(key, value, unit)

    def document(self) -> dict[str, dict[str, object]]:
        return {
            key: {
                "median": round(statistics.median(values), 4),
                "p99": round(p99(values), 4),
                "min": round(min(values), 4),
                "max": round(max(values), 4),
                "n": len(values),
                "unit": unit,
            }
            for key, (unit, values) in self._samples.items()
        }

    def tell(self) -> None:
        """Prints the figures, for a measurement that is run alone."""
        for key, figure in self.document().items():
            print(
                f"{key:32} {figure['median']:>10} {figure['min']:>10} {figure['max']:>10} n {figure['n']} {figure['unit']}"
            )


def p99(values: list[float]) -> float:
    """The smallest sample that 99 % do not exceed; with fewer than 100 samples, the greatest."""
    return sorted(values)[math.ceil(len(values) * 0.99) - 1]


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.monotonic()
    call()
    return (time.monotonic() - started) * 1000
