"""The cluster that the node is part of: guests' data come from there, and what is wrong with VMs is told there."""

from __future__ import annotations

from typing import Protocol

from virtshim.domain.guest.data_source import Data, DataSource
from virtshim.domain.troubles.pod_event import PodEvent


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
