"""The cluster that the node is part of, as far as guests' data come from there."""

from __future__ import annotations

from typing import Protocol

from virtshim.domain.guest.data_source import Data, DataSource


class ClusterObjects(Protocol):
    """Secrets and ConfigMaps."""

    def read(self, source: DataSource, namespace: str) -> Data:
        """As it is now: never kept, never logged. Raises ShimError with the reason and the remedy: one that is not there, or that
        this node may not read; an API server that does not answer in time; a node that has none."""
