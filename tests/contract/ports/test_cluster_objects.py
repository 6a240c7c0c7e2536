"""ClusterObjects: what the fake and the API server's client both do."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.apiserver import Api, kubeconfig
from fakes.cluster import FakeClusterObjects

from virtshim.domain.errors import WrongState
from virtshim.domain.guest.data_source import Data, DataSource
from virtshim.kubeapi.objects import KubeObjects
from virtshim.ports.cluster import ClusterObjects

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


def test_an_object_is_read_whole_as_it_is_now(parts: tuple[ClusterObjects, Publish]) -> None:
    objects, publish = parts
    for source in (SECRET, CONFIGMAP):
        publish("team", source, {"key": b"\xff", "other": b""})
        assert objects.read(source, "team") == {"key": b"\xff", "other": b""}
        publish("team", source, {})
        assert objects.read(source, "team") == {}


def test_one_that_is_not_in_that_namespace_is_refused(parts: tuple[ClusterObjects, Publish]) -> None:
    objects, publish = parts
    publish("other", SECRET, {"key": b"x"})
    publish("team", CONFIGMAP, {"key": b"x"})
    with pytest.raises(WrongState):
        objects.read(SECRET, "team")
