"""The fakes and the clients of the API server fulfil the contract of ClusterObjects and PodEvents."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.apiserver import Api, kubeconfig
from fakes.cluster import FakeClusterObjects, FakePodEvents
from fakes.waiting import eventually

from virtshim.kubeapi.events import KubeEvents
from virtshim.kubeapi.objects import KubeObjects
from virtshim.kubeapi.ports import ClusterObjects, PodEvent, PodEvents
from virtshim.model.errors import WrongState
from virtshim.model.sandbox import PodKey
from virtshim.seed.sources import Data, DataSource
from virtshim.system.clock import SystemClock

Publish = Callable[[str, DataSource, Data], None]
SECRET, CONFIGMAP = DataSource("secret", "one"), DataSource("configmap", "one", "key")


def _fake(_place: Path) -> Iterator[tuple[ClusterObjects, Publish]]:
    fake = FakeClusterObjects()

    def publish(namespace: str, source: DataSource, data: Data) -> None:
        fake.objects[f"{namespace}/{source}"] = data

    yield fake, publish


def _real(place: Path) -> Iterator[tuple[ClusterObjects, Publish]]:
    api = Api(place)

    def publish(namespace: str, source: DataSource, data: Data) -> None:
        encoded = {key: base64.b64encode(content).decode() for key, content in data.items()}
        field = "data" if source.kind == "secret" else "binaryData"
        api.answers[f"/prefix/api/v1/namespaces/{namespace}/{source.kind}s/{source.name}"] = {field: encoded}

    try:
        yield KubeObjects(kubeconfig(api, place, {"token": "secret"})), publish
    finally:
        api.close()


@pytest.fixture(params=[_fake, _real], ids=["fake", "api"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ClusterObjects, Publish]]:
    yield from request.param(tmp_path)


def test_an_object_is_read_in_its_current_version(parts: tuple[ClusterObjects, Publish]) -> None:
    objects, publish = parts
    for source in (SECRET, CONFIGMAP):
        publish("team", source, {"key": b"\xff", "other": b""})
        assert objects.read(source, "team") == {"key": b"\xff", "other": b""}
        publish("team", source, {})
        assert objects.read(source, "team") == {}


def test_an_object_of_another_namespace_or_kind_is_refused(parts: tuple[ClusterObjects, Publish]) -> None:
    objects, publish = parts
    publish("other", SECRET, {"key": b"x"})
    publish("team", CONFIGMAP, {"key": b"x"})
    with pytest.raises(WrongState):
        objects.read(SECRET, "team")


# --- Events of pods

Told = Callable[[], list[tuple[str, str, str]]]


def _fake_events(_place: Path) -> Iterator[tuple[PodEvents, Told]]:
    fake = FakePodEvents()
    yield fake, lambda: [(one.pod.uid, one.reason, one.message) for one in fake.told]


def _real_events(place: Path) -> Iterator[tuple[PodEvents, Told]]:
    api = Api(place)
    found: list[tuple[str, str, str]] = []

    def taken(document: dict[str, Any]) -> dict[str, Any]:
        found.append((document["involvedObject"]["uid"], document["reason"], document["message"]))
        return document

    api.answers["/prefix/api/v1/namespaces/team/events"] = taken
    events = KubeEvents(kubeconfig(api, place, {"token": "secret"}), SystemClock())
    try:
        yield events, lambda: found
    finally:
        events.close()
        api.close()


@pytest.fixture(params=[_fake_events, _real_events], ids=["fake", "api"])
def events(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[PodEvents, Told]]:
    yield from request.param(tmp_path)


def test_events_arrive_in_their_order(events: tuple[PodEvents, Told]) -> None:
    sender, told = events
    pod = PodKey("team", "web", "uid-1", 0)
    sender.tell(PodEvent(pod, "Paused", "it is paused", is_warning=True, at=1))
    sender.tell(PodEvent(pod, "TroubleOver", "it goes on", is_warning=False, at=2))
    eventually(lambda: told() == [("uid-1", "Paused", "it is paused"), ("uid-1", "TroubleOver", "it goes on")])
