"""Ports to the node's cluster: data for guests, and Events of pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from virtshim.model.sandbox import PodKey
from virtshim.model.troubles import TroubleChange
from virtshim.seed.sources import Data, DataSource

# The reason of the Event at a trouble's end.
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
    """A Warning if the trouble begins, a normal Event if it is over."""
    reason = change.trouble.kind.reason
    if change.is_over:
        return PodEvent(pod, OVER, f"container {container}: {reason} is over: {change.text}", is_warning=False, at=at)
    return PodEvent(pod, reason, f"container {container}: {change.text}", is_warning=True, at=at)


class ClusterObjects(Protocol):
    """Secrets and ConfigMaps."""

    def read(self, source: DataSource, namespace: str) -> Data:
        """Reads the object's present data, which are never stored or logged. Raises ShimError with reason and remedy if the
        object does not exist, this node may not read it or has no API server, or the server does not answer in time."""


class PodEvents(Protocol):
    """Events of pods, which `kubectl describe` shows."""

    def tell(self, event: PodEvent) -> None:
        """Returns at once and never raises. The Event is sent later, if the node has an API server and the pod is within its rate
        limit. Unsent Events are lost with the process."""
