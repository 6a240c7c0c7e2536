"""The cluster that the node is part of: guests' data come from there, and what is wrong with VMs is told there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from virtshim.model.sandbox import PodKey
from virtshim.model.troubles import TroubleChange
from virtshim.seed.sources import Data, DataSource

# What virtshim tells a pod's owner by an Event of the pod. No I/O.

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


class ClusterObjects(Protocol):
    """Secrets and ConfigMaps."""

    def read(self, source: DataSource, namespace: str) -> Data:
        """As it is now: never kept, never logged. Raises ShimError with the reason and the remedy: one that is not there, or that
        this node may not read; an API server that does not answer in time; a node that has none."""


class PodEvents(Protocol):
    """Events of pods, which `kubectl describe` shows."""

    def tell(self, event: PodEvent) -> None:
        """Returns at once and never raises. The event is sent later, if the node has an API server and the pod has not told too
        many. One that could not be sent is lost with the process."""
