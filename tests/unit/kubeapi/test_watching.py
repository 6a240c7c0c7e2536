"""A watched collection of objects follows the API server."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.kubernetes_api import Asked, KubernetesApi, Refused

from virtshim.kubeapi.kubeconfig import access
from virtshim.kubeapi.watching import Collection


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesApi]:
    made = KubernetesApi(tmp_path)
    yield made
    made.close()


@pytest.fixture
def pods(api: KubernetesApi) -> Iterator[Collection]:
    """Its waits for the next try take no time."""
    config = api.kubeconfig()
    made = Collection(lambda: access(config), "/api/v1/pods", lambda _one: None, FakeClock())
    with contextlib.closing(made):
        yield made


def put(api: KubernetesApi, name: str, **annotations: str) -> None:
    api.put("pods", {"metadata": {"namespace": "shop", "name": name, "annotations": annotations}, "spec": {}})


def names(pods: Collection) -> set[str]:
    return {one["metadata"]["name"] for one in pods.all()}


def until(api: KubernetesApi, condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        with api.news:
            api.news.wait(0.02)


def test_a_long_list_comes_in_pages(api: KubernetesApi, pods: Collection) -> None:
    for number in range(250):
        put(api, f"pod{number}")
    pods.start()
    until(api, lambda: len(pods.all()) == 250)
    assert [one for one in api.asked if "limit=100" in one] == api.asked[:3]


def test_a_page_that_is_too_old_begins_the_list_again(api: KubernetesApi, pods: Collection) -> None:
    for number in range(150):
        put(api, f"pod{number}")
    refused: list[str] = []

    def refuse(asked: Asked) -> None:
        if "continue" in asked.query and not refused:
            refused.append(asked.query["continue"])
            raise Refused(410, "Expired", "the continue parameter is too old")

    api.before = refuse
    pods.start()
    until(api, lambda: len(pods.all()) == 150)
    assert refused


def test_a_watch_that_is_too_old_is_listed_again(api: KubernetesApi, pods: Collection) -> None:
    put(api, "one")
    pods.start()
    until(api, lambda: any("watch=true" in one for one in api.asked))
    api.gone("pods", "shop", "one")
    api.forget_history()
    put(api, "two")
    until(api, lambda: names(pods) == {"two"})


def test_a_change_that_is_too_large_is_not_kept_in_memory_and_the_others_continue(
    api: KubernetesApi, pods: Collection
) -> None:
    put(api, "one")
    pods.start()
    until(api, lambda: any("watch=true" in one for one in api.asked))
    lists = len([one for one in api.asked if "limit=" in one])
    put(api, "large", text="x" * (9 << 20))
    until(api, lambda: len([one for one in api.asked if "limit=" in one]) > lists)
    api.gone("pods", "shop", "large")
    put(api, "two")
    until(api, lambda: names(pods) == {"one", "two"})


def test_an_older_change_does_not_replace_what_was_written_since(api: KubernetesApi, pods: Collection) -> None:
    """Whoever writes an object sees its own write at once, but not as older than what the watch has brought."""
    put(api, "one")
    pods.start()
    until(api, lambda: names(pods) == {"one"})
    seen = pods.get("shop", "one")
    assert seen is not None
    version = seen["metadata"]["resourceVersion"]
    newer = {**seen, "metadata": {**seen["metadata"], "resourceVersion": "900", "labels": {"by": "me"}}}
    pods.wrote(newer, "some other version")
    assert pods.get("shop", "one") == seen
    pods.wrote(newer, version)
    assert pods.get("shop", "one") == newer


def test_an_object_that_cannot_be_understood_does_not_end_the_watch(api: KubernetesApi) -> None:
    met: list[str] = []

    def changed(one: Any) -> None:
        met.append(one["metadata"]["name"])
        if met == ["odd"]:
            raise KeyError("spec")

    config = api.kubeconfig()
    with contextlib.closing(Collection(lambda: access(config), "/api/v1/pods", changed, FakeClock())) as pods:
        pods.start()
        until(api, lambda: any("watch=true" in one for one in api.asked))
        put(api, "odd")
        until(api, lambda: met)
        put(api, "next")
        until(api, lambda: names(pods) == {"odd", "next"} and "next" in met)


def test_the_end_of_a_watch_does_not_turn_tls_off(
    api: KubernetesApi, pods: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSLSocket.shutdown does, and a request that is just being sent would show its token."""
    pods.start()
    until(api, lambda: any("watch=true" in one for one in api.asked))
    ended: list[ssl.SSLSocket] = []

    def shutdown(one: ssl.SSLSocket, _how: int) -> None:
        ended.extend([] if one.server_side else [one])

    monkeypatch.setattr(ssl.SSLSocket, "shutdown", shutdown)
    pods.close()
    assert ended == []
