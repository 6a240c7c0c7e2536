"""The cluster's Secrets and ConfigMaps, and its pods' Events, in memory."""

from __future__ import annotations

from virtshim.kubeapi.ports import PodEvent
from virtshim.model.errors import WrongState
from virtshim.seed.sources import Data, DataSource


class FakeClusterObjects:
    """Implements `virtshim.kubeapi.ports.ClusterObjects`."""

    def __init__(self) -> None:
        # "NAMESPACE/KIND/NAME" -> its data.
        self.objects: dict[str, Data] = {}
        self.asked: list[str] = []

    def read(self, source: DataSource, namespace: str) -> Data:
        name = f"{namespace}/{source}"
        self.asked.append(name)
        if name not in self.objects:
            raise WrongState("there is none")
        return self.objects[name]


class FakePodEvents:
    """Implements `virtshim.kubeapi.ports.PodEvents`."""

    def __init__(self) -> None:
        self.told: list[PodEvent] = []

    def tell(self, event: PodEvent) -> None:
        self.told.append(event)
