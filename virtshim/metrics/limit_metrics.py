"""The metric of limits that pods meet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from virtshim.metrics.family import Family, Kind, Sample
from virtshim.metrics.usage import SandboxUsage

# Conformance wants a sample of all that is described from every running pod.
_LIMITS: Final = ("commands", "connections", "sessions", "urls")


def _refused(use: SandboxUsage) -> Iterable[Sample]:
    return [Sample(use.refused.get(limit, 0), (limit,)) for limit in _LIMITS]


POD = (
    Family(
        "virtshim_refused_total",
        Kind.COUNTER,
        "Requests of the pod beyond a limit, since virtshim was started: commands of ExecSync, forwarded connections, sessions, "
        "or URLs for them.",
        _refused,
        ("limit",),
    ),
)
