"""What virtshim tells a pod's owner by an Event of the pod. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from virtshim.domain.sandbox import PodKey
from virtshim.domain.troubles.trouble import TroubleChange

# The reason of the Event that tells a trouble's end.
OVER: Final = "TroubleOver"


@dataclass(frozen=True, slots=True)
class PodEvent:
    """`reason` in CamelCase, `message` at most 1024 characters. `at`: nanoseconds since the epoch."""

    pod: PodKey
    reason: str
    message: str
    is_warning: bool
    at: int


def event_of(change: TroubleChange, pod: PodKey, container: str, at: int) -> PodEvent:
    """A Warning when the trouble begins, a normal Event when it is over."""
    reason = change.trouble.kind.reason
    if change.is_over:
        return PodEvent(pod, OVER, f"container {container}: {reason} is over: {change.text}", is_warning=False, at=at)
    return PodEvent(pod, reason, f"container {container}: {change.text}", is_warning=True, at=at)
