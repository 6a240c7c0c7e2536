"""If the controller or the agent dies before or after a write, another one continues from what is written."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fakes.cluster_parts import ClusterParts
from fakes.kubernetes_api import Asked, KubernetesApi
from fakes.node_vms import Virtshim, lasting, put_vm_with_pod
from fakes.virtual_machines import are_away, is_running, patch, pods, status

from virtshim.cluster.agent import Agent
from virtshim.cluster.controller import Controller
from virtshim.cluster.webhook import Webhook
from virtshim.cri.operator_client import SavedMemory
from virtshim.kubeapi.kubeconfig import access
from virtshim.system.clock import SystemClock

Start = Callable[..., Controller]
Serve = Callable[[Controller], Webhook]
Create = Callable[..., dict[str, Any]]

# What a user asks for, and the writes that follow.
LIFE = [
    *itertools.product(
        ["start"],
        [
            "PATCH virtualmachines",
            "POST poddisruptionbudgets",
            "POST pods",
            "PATCH virtualmachines/status",
            "PATCH pods",
        ],
    ),
    *itertools.product(["move"], ["POST pods", "PATCH virtualmachines/status", "PATCH pods", "DELETE pods"]),
    *itertools.product(["delete"], ["DELETE poddisruptionbudgets", "DELETE pods", "PATCH virtualmachines"]),
]


def ask_for(api: KubernetesApi, wish: str) -> None:
    if wish == "move":
        patch(api, moveTo="n2")
    elif wish == "delete":
        gone = {"deletionTimestamp": "2026-01-31T12:00:00Z"}
        api.edit("virtualmachines", "shop", "db", lambda one: one["metadata"].update(gone))


@pytest.mark.parametrize(("wish", "write"), LIFE, ids=["-".join(one).replace(" ", "-") for one in LIFE])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_controller_that_is_killed_at_a_write_is_followed_by_another_one(
    api: KubernetesApi,
    parts: ClusterParts,
    controller_of: Start,
    webhook_of: Serve,
    vms: Create,
    wish: str,
    write: str,
    done: bool,
) -> None:
    """Its connections are cut from that moment on."""
    died: list[str] = []
    wished: list[str] = []

    def cut(asked: Asked) -> None:
        if asked.token != "doomed":
            return
        name = f"{asked.method} {asked.resource.plural}" + ("/status" if asked.sub == "status" else "")
        if not died and wished and name == write:
            died.append(name)
            if done:
                api.answer(asked)
        if died:
            raise ConnectionResetError

    api.before = cut
    doomed = controller_of("doomed")
    if wish == "start":
        wished.append(wish)
    vms("db")
    if wish != "start":
        parts.until(lambda: is_running(api, node="n1"))
        wished.append(wish)
        ask_for(api, wish)
    parts.until(lambda: died)
    doomed.close()
    webhook_of(controller_of())
    if wish == "delete":
        parts.until(lambda: not api.all("virtualmachines"))
        assert (api.all("pods"), api.all("poddisruptionbudgets")) == ([], [])
        return
    parts.until(lambda: is_running(api, node="n2" if wish == "move" else "n1"))
    parts.cordon("n1")
    parts.until(lambda: are_away(api, "db"))
    assert len(pods(api)) == 1


class KilledError(BaseException):
    """The process is gone: nobody catches this."""


class Doomed:
    """Passes calls on, and dies before or after one of the writes."""

    def __init__(self, real: Any, writes: itertools.count[int], at: int, *, done: bool) -> None:
        self._real, self._writes, self._at, self._done = real, writes, at, done

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name not in ("create", "change", "change_lists", "act", "remove_vm", "take_vm"):
            return real

        def write(*words: Any, **named: Any) -> Any:
            is_last = next(self._writes) == self._at
            if is_last and not self._done:
                raise KilledError
            try:
                return real(*words, **named)
            finally:
                if is_last:
                    raise KilledError

        return write


# The number of a write that is never reached.
NEVER = -1


def look_until_killed(api: KubernetesApi, virtshim: Virtshim, at: int, *, done: bool) -> bool:
    """Starts an agent that looks twice. It dies at the write with the number `at`; whether it did."""
    config, writes = api.kubeconfig(), itertools.count()
    socket: Any = Doomed(virtshim, writes, at, done=done)
    agent = Agent(
        "n1", "virtshim-cluster", lambda: access(config), SystemClock(), lambda: contextlib.nullcontext(socket)
    )
    agent.api = Doomed(agent.api, writes, at, done=done)  # type: ignore[assignment]
    with contextlib.closing(agent):
        agent.start()
        try:
            agent.look()
            agent.look()
        except KilledError:
            return True
    return False


@dataclass
class Story:
    """`vm`: what virtshim has. `asks`: what the objects ask for. At the end: `done`: what virtshim was told; `said`: the pod's
    conditions; `kept`: what the object says of nodes."""

    vm: Callable[[], Virtshim]
    asks: dict[str, Callable[[dict[str, Any]], None]]
    done: set[str]
    said: dict[str, tuple[str, str]]
    kept: dict[str, Any]


def paused(one: dict[str, Any]) -> None:
    one["metadata"]["annotations"] = {"cluster.virtshim.io/pause": "true"}


def taken(one: dict[str, Any]) -> None:
    one["metadata"]["annotations"] = {"cluster.virtshim.io/take": "true", "virtshim.io/restore-from": "n2"}


def deleted(one: dict[str, Any]) -> None:
    one["metadata"] |= {"deletionTimestamp": "2026-01-31T12:00:00Z", "finalizers": ["virtshim.io/kept"]}
    one["status"] = {"nodes": {"n1": {}}}


UNUSED = {"pod": "", "pod_id": "", "vm_id": ""}
SAVED = lasting(**UNUSED, saved=SavedMemory(7, 10.0, 20.0, taken=False))
UNDECIDED = lasting(comes_from="n2", undecided=True)

STORIES = {
    "a pause": Story(Virtshim, {"pods": paused}, {"pause"}, {"paused": ("True", "Requested")}, {"n1": {}}),
    "a saved memory": Story(
        lambda: Virtshim([SAVED]), {}, set(), {}, {"n1": {"savedAt": 10.0, "savedBytes": 7, "lapsesAt": 20.0}}
    ),
    "a forced take": Story(
        lambda: Virtshim([UNDECIDED]), {"pods": taken}, {"take"}, {"arrived": ("True", "Arrived")}, {"n1": {}}
    ),
    "a deleted object": Story(lambda: Virtshim([lasting(**UNUSED)]), {"virtualmachines": deleted}, {"remove"}, {}, {}),
}


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_an_agent_that_is_killed_at_any_write_is_followed_by_another_one(
    api: KubernetesApi, story: Story, done: bool
) -> None:
    for at in itertools.count():
        put_vm_with_pod(api)
        for one in api.all("leases"):
            api.gone("leases", "virtshim-cluster", one["metadata"]["name"])
        for plural, change in story.asks.items():
            api.edit(plural, "shop", "db-1" if plural == "pods" else "db", change)
        virtshim = story.vm()
        died = look_until_killed(api, virtshim, at, done=done)
        assert look_until_killed(api, virtshim, NEVER, done=done) is False
        assert set(virtshim.done) == story.done
        said = {one["type"]: (one["status"], one.get("reason")) for one in pods(api)[0]["status"]["conditions"]}
        assert {name: said.get(f"virtshim.io/{name}") for name in story.said} == story.said, at
        assert status(api).get("nodes", {}) == story.kept, at
        assert [one["metadata"]["name"] for one in api.all("leases")] == ["virtshim-agent.n1"]
        if not died:
            break
    assert at >= 2


def test_a_pause_ends_on_request_after_the_agent_was_killed_before_it_could_say_who_asked(api: KubernetesApi) -> None:
    virtshim = Virtshim()
    put_vm_with_pod(api)
    api.edit("pods", "shop", "db-1", paused)
    assert look_until_killed(api, virtshim, 2, done=True)  # 0 and 1 are the sign of life
    assert virtshim.done == ["pause"]
    look_until_killed(api, virtshim, NEVER, done=True)
    api.edit("pods", "shop", "db-1", lambda one: one["metadata"].update(annotations={}))
    look_until_killed(api, virtshim, NEVER, done=True)
    assert virtshim.done == ["pause", "resume"]
