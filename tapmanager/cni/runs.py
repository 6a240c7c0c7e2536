"""How long CNI plugins ran and how often they failed, counted since this process was started."""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass, field

from tapmanager.fields import Json

# Seconds: upper bounds of the histogram's buckets, behind which comes one without a bound.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Commands and plugins: operators have a few, and change them now and then.
_MOST = 256


@dataclass(slots=True)
class _Runs:
    failures: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))


class PluginRuns:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[tuple[str, str], _Runs] = {}

    def ran(self, command: str, plugin: str, seconds: float, *, failed: bool) -> None:
        with self._lock:
            if (command, plugin) not in self._runs and len(self._runs) >= _MOST:
                return
            runs = self._runs.setdefault((command, plugin), _Runs())
            runs.failures += failed
            runs.seconds += seconds
            runs.buckets[bisect.bisect_left(BOUNDS, seconds)] += 1

    def as_json(self) -> Json:
        """Counts of each bucket alone, not of those below it too."""
        with self._lock:
            return {
                "bounds": list(BOUNDS),
                "runs": [
                    {
                        "command": command,
                        "plugin": plugin,
                        "failures": runs.failures,
                        "ms": round(runs.seconds * 1000),
                        "buckets": list(runs.buckets),
                    }
                    for (command, plugin), runs in self._runs.items()
                ],
            }
