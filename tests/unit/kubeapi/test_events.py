"""Events of pods reach an API server over TLS, and their number is limited."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.apiserver import Api, kubeconfig
from fakes.clock import FakeClock
from fakes.waiting import eventually
from structlog.testing import capture_logs

from virtshim.kubeapi.events import KubeEvents
from virtshim.kubeapi.ports import PodEvent
from virtshim.model.sandbox import PodKey

PATH = "/prefix/api/v1/namespaces/team/events"
TOKEN = {"token": "secret"}
POD = PodKey("team", "web-0", "uid-1", 0)
START = 1_800_000_000_000_000_000


class Taken:
    """What the server was sent. `answers`: statuses of the first ones, in place of what is usual."""

    def __init__(self, *answers: int) -> None:
        self.documents: list[dict[str, Any]] = []
        self._answers = list(answers)

    def __call__(self, document: dict[str, Any]) -> Any:
        self.documents.append(document)
        return self._answers.pop(0) if self._answers else document


@pytest.fixture
def api(apiserver: Api) -> Api:
    apiserver.asked.clear()
    apiserver.answers = {}
    return apiserver


Make = Callable[..., tuple[KubeEvents, Taken]]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make(api: Api, clock: FakeClock, tmp_path: Path) -> Iterator[Make]:
    made: list[KubeEvents] = []

    def sender(*answers: int) -> tuple[KubeEvents, Taken]:
        api.answers[PATH] = taken = Taken(*answers)
        made.append(KubeEvents(kubeconfig(api, tmp_path, TOKEN), clock))
        return made[-1], taken

    yield sender
    for one in made:
        one.close()


def event(number: int = 0, pod: PodKey = POD) -> PodEvent:
    return PodEvent(pod, "VolumesNotMounted", f"it is gone {number}", is_warning=True, at=START)


def test_an_event_names_the_pod_and_is_in_its_namespace(make: Make) -> None:
    events, taken = make()
    events.tell(event())
    eventually(lambda: taken.documents)
    (document,) = taken.documents
    name = document["metadata"].pop("name")
    assert name.startswith("web-0.")
    host = document["source"]["host"]
    assert document == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "team"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "team", "name": "web-0", "uid": "uid-1"},
        "type": "Warning",
        "reason": "VolumesNotMounted",
        "message": "it is gone 0",
        "firstTimestamp": "2027-01-15T08:00:00Z",
        "lastTimestamp": "2027-01-15T08:00:00Z",
        "count": 1,
        "source": {"component": "virtshim", "host": host},
        "reportingComponent": "virtshim",
        "reportingInstance": host,
    }


def test_events_of_a_pod_with_the_longest_name_have_distinct_names(make: Make) -> None:
    events, taken = make()
    pod = PodKey("team", "a" * 236 + "." + "b" * 16, "uid-2", 0)
    events.tell(event(0, pod))
    events.tell(event(1, pod))
    eventually(lambda: len(taken.documents) == 2)
    names = {document["metadata"]["name"] for document in taken.documents}
    assert len(names) == 2
    assert all(len(name) <= 253 and ".." not in name for name in names)


def test_a_node_without_a_kubeconfig_sends_no_events(api: Api) -> None:
    events = KubeEvents("", FakeClock())
    events.tell(event())
    assert [one for one in threading.enumerate() if one.name == "events"] == []
    assert api.asked == []


def test_a_kubeconfig_set_by_a_reload_is_used(api: Api, make: Make, tmp_path: Path) -> None:
    events, taken = make()
    events.use("")
    events.tell(event(0))
    events.use(kubeconfig(api, tmp_path, TOKEN))
    events.tell(event(1))
    eventually(lambda: [one["message"] for one in taken.documents] == ["it is gone 1"])


def test_an_event_is_sent_again_under_its_name_until_the_server_takes_it(make: Make) -> None:
    events, taken = make(500, 429, 503)
    events.tell(event())
    eventually(lambda: len(taken.documents) == 4)
    assert len({one["metadata"]["name"] for one in taken.documents}) == 1


def test_an_event_that_the_server_has_already_is_not_sent_again(make: Make) -> None:
    events, taken = make(500, 409)
    events.tell(event(0))
    events.tell(event(1))
    eventually(lambda: [one["message"] for one in taken.documents] == ["it is gone 0"] * 2 + ["it is gone 1"])


def test_a_refusal_is_logged_once_with_the_remedy_and_the_next_event_is_tried(make: Make) -> None:
    events, taken = make(403, 403)
    with capture_logs() as logs:
        for number in range(3):
            events.tell(event(number))
        eventually(lambda: len(taken.documents) == 3 and len(logs) == 2)
    assert [one["event"] for one in logs] == ["events.unsent", "events.sent_again"]
    assert "docs/security.md, Events of pods" in logs[0]["remedy"]


def test_an_absent_server_is_given_up_after_ten_minutes_and_delays_nothing(
    api: Api, clock: FakeClock, make: Make, tmp_path: Path
) -> None:
    events, taken = make()
    kubeconfig(api, tmp_path, TOKEN, server="https://127.0.0.1:1")
    began = clock.monotonic()
    with capture_logs() as logs:
        events.tell(event(0))
        eventually(lambda: clock.monotonic() >= began + 600)
        kubeconfig(api, tmp_path, TOKEN)
        eventually(lambda: events.tell(event(1)) or taken.documents)
    assert [one["event"] for one in logs].count("events.unsent") == 1
    assert {one["message"] for one in taken.documents} <= {"it is gone 0", "it is gone 1"}


def test_a_full_queue_drops_the_oldest_event_and_logs_this_once(
    api: Api, make: Make, clock: FakeClock, tmp_path: Path
) -> None:
    clock.held = True
    events, taken = make()
    kubeconfig(api, tmp_path, TOKEN, server="https://127.0.0.1:1")
    with capture_logs() as logs:
        for number in range(300):
            events.tell(event(number, PodKey("team", "web", f"uid-{number}", 0)))
        eventually(lambda: [one["event"] for one in logs].count("events.unsent") == 1)
        kubeconfig(api, tmp_path, TOKEN)
        eventually(lambda: clock.advance(1) or "it is gone 299" in [one["message"] for one in taken.documents])
    assert [one["event"] for one in logs].count("events.dropped") == 1
    assert len(taken.documents) == 256


def test_a_flapping_pods_events_are_limited_and_other_pods_events_are_not(make: Make, clock: FakeClock) -> None:
    clock.held = True
    events, taken = make()
    with capture_logs() as logs:
        for number in range(30):
            events.tell(event(number))
        events.tell(event(99, PodKey("team", "other", "uid-9", 0)))
        eventually(lambda: taken.documents and taken.documents[-1]["involvedObject"]["name"] == "other")
    assert len(taken.documents) == 10 + 1
    assert [one["event"] for one in logs] == ["events.too_many"]
    clock.advance(60)
    events.tell(event(30))
    eventually(lambda: len(taken.documents) == 10 + 2)


def test_an_event_without_a_thread_is_sent_with_the_next_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    events, taken = make()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        events.tell(event(1))
    events.tell(event(2))
    eventually(lambda: len(taken.documents) == 2)
