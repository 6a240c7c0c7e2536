"""The controller and the agents keep their times, on a clock that the test moves."""

from __future__ import annotations

import base64
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.clock import FakeClock
from fakes.cluster_parts import ClusterParts
from fakes.kubernetes_api import Asked, KubernetesApi, Refused
from fakes.node_vms import Virtshim, lasting
from fakes.virtual_machines import are_away, condition, evict, is_running, patch, pods, status
from structlog.testing import capture_logs

from virtshim.cluster.agent import Agent
from virtshim.cluster.controller import Controller
from virtshim.cluster.moving import MoveLimits
from virtshim.cluster.webhook import Webhook
from virtshim.kubeapi.kubeconfig import access

Start = Callable[..., Controller]
Serve = Callable[[Controller], Webhook]
Create = Callable[..., dict[str, Any]]

FIVE_MINUTES = 300
CLUSTER = Path(__file__).resolve().parents[3] / "deploy/kustomize/overlays/cluster"
TEN_NODES = tuple(f"n{number}" for number in range(1, 11))


@pytest.fixture
def clock() -> FakeClock:
    made = FakeClock()
    made.held = True
    return made


def passes(clock: FakeClock, parts: ClusterParts, seconds: float) -> bool:
    """Lets time pass in which the agents go on. True, for conditions that a test waits for."""
    clock.advance(seconds)
    for node in parts.api.all("nodes"):
        parts.agent_sign(node["metadata"]["name"])
    return True


def test_a_drain_that_nobody_repeats_lapses(
    api: KubernetesApi, parts: ClusterParts, clock: FakeClock, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db")
    parts.until(lambda: is_running(api, node="n1"))
    parts.deaf.add("db")
    evict(api)
    parts.until(lambda: status(api).get("phase") == "Moving")
    passes(clock, parts, 59)
    evict(api)
    passes(clock, parts, 59)
    parts.until(lambda: "12 of 100 MiB" in status(api).get("moveProgress", ""))
    assert status(api)["phase"] == "Moving"
    passes(clock, parts, 2)
    parts.until(lambda: is_running(api, node="n1"))
    assert parts.ran_on["db"] == ["n1"]


def test_a_late_repeat_of_a_drain_does_not_move_it_again(
    api: KubernetesApi, parts: ClusterParts, clock: FakeClock, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db")
    parts.until(lambda: is_running(api, node="n1"))
    (first,) = pods(api)
    parts.until(lambda: api.evict("shop", first["metadata"]["name"])["code"] and is_running(api, node="n2"))
    assert api.evict("shop", first["metadata"]["name"])["code"] == 404
    for _ in range(4):
        passes(clock, parts, 30)
    parts.until(lambda: condition(api, "Draining") == ("False", "NotAsked"))
    assert parts.ran_on["db"] == ["n1", "n2"]
    assert is_running(api, node="n2")


def test_two_at_once_move_from_one_node_and_the_next_one_follows(
    api: KubernetesApi, parts: ClusterParts, clock: FakeClock, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of(limits=MoveLimits()))
    names = ("a", "b", "c")
    for name in names:
        vms(name)
    parts.until(lambda: all(is_running(api, name, "n1") for name in names))
    parts.deaf |= set(names)
    parts.cordon("n1")
    parts.until(
        lambda: (
            [evict(api, name)[0] for name in names]
            and sum("target" in status(api, name)["record"] for name in names) >= 2
        )
    )
    waiting = [name for name in names if "target" not in status(api, name)["record"]]
    assert len(waiting) == 1
    assert "it waits: 2 virtual machines move from node n1 now" in evict(api, waiting[0])[1]
    parts.deaf.clear()
    parts.until(lambda: passes(clock, parts, 1) and are_away(api, *names))


def test_a_refused_pod_is_tried_and_told_less_and_less_often_and_the_status_says_why(
    api: KubernetesApi, parts: ClusterParts, clock: FakeClock, controller_of: Start, vms: Create
) -> None:
    tried: list[float] = []

    def refuse(asked: Asked) -> None:
        if asked.method == "POST" and asked.resource.plural == "pods":
            tried.append(clock.now_ns() / 1e9)
            raise Refused(403, "Forbidden", "exceeded quota: small")

    api.before = refuse
    controller_of()
    vms("db")
    parts.until(lambda: condition(api, "Ready") == ("False", "PodRefused"))
    parts.until(lambda: passes(clock, parts, 1) and len(tried) == 4)
    assert [
        after - before >= least for before, after, least in zip(tried[:3], tried[1:], (5, 10, 20), strict=True)
    ] == [True] * 3
    (ready,) = [one for one in status(api)["conditions"] if one["type"] == "Ready"]
    assert "exceeded quota: small" in ready["message"]
    parts.until(lambda: len([one for one in api.all("events") if one["reason"] == "PodRefused"]) == 4)
    api.before = None
    api.edit("virtualmachines", "shop", "db", lambda one: one["metadata"].update(generation=2))
    parts.until(lambda: is_running(api))
    assert "podRefusal" not in status(api)["record"]


def test_a_budget_of_somebody_else_is_told_and_the_virtual_machine_runs(
    api: KubernetesApi, parts: ClusterParts, clock: FakeClock, controller_of: Start, vms: Create
) -> None:
    api.put("poddisruptionbudgets", {"metadata": {"namespace": "shop", "name": "virtshim-db"}, "spec": {}})
    controller_of()
    vms("db")
    parts.until(lambda: is_running(api))
    parts.until(lambda: passes(clock, parts, 1) and condition(api, "Protected") == ("False", "BudgetRefused"))
    (event,) = [one for one in api.all("events") if one["reason"] == "BudgetRefused"]
    assert "PodDisruptionBudget virtshim-db is not this virtual machine's; remove or rename it" in event["message"]
    api.gone("poddisruptionbudgets", "shop", "virtshim-db")
    parts.until(lambda: passes(clock, parts, 1) and condition(api, "Protected") == ("True", "Budget"))
    parts.until(lambda: "budgetRefusal" not in status(api)["record"])


def test_the_status_doubts_an_agent_that_is_silent(
    api: KubernetesApi, parts: ClusterParts, clock: FakeClock, controller_of: Start, vms: Create
) -> None:
    controller_of()
    vms("db")
    parts.until(lambda: is_running(api))
    clock.advance(61)
    parts.until(lambda: status(api)["phase"] == "Unknown")
    parts.agent_sign("n1")
    parts.until(lambda: status(api)["phase"] == "Running")


def test_an_agent_whose_clock_is_an_hour_behind_is_believed_while_it_goes_on(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, vms: Create
) -> None:
    parts.agent_sign("n1", ago=3600)
    controller_of()
    vms("db")
    parts.until(lambda: status(api).get("phase") == "Unknown")
    parts.agent_sign("n1", ago=3580)
    parts.until(lambda: is_running(api))


def test_an_agent_whose_clock_is_an_hour_ahead_is_doubted_when_it_stops(
    api: KubernetesApi, parts: ClusterParts, clock: FakeClock, controller_of: Start, vms: Create
) -> None:
    parts.agent_sign("n1", ago=-3600)
    controller_of()
    vms("db")
    parts.until(lambda: is_running(api))
    clock.advance(61)
    parts.until(lambda: status(api)["phase"] == "Unknown")


def test_a_webhook_that_cannot_write_its_next_certificate_tries_again(
    api: KubernetesApi, clock: FakeClock, controller_of: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = next(yaml.safe_load_all((CLUSTER / "webhook.yaml").read_text()))
    api.put("validatingwebhookconfigurations", shipped)

    def trusts() -> int:
        (one,) = api.one("validatingwebhookconfigurations", "", "virtshim-evictions")["webhooks"]
        return base64.b64decode(one["clientConfig"].get("caBundle", "")).count(b"BEGIN")

    controller = controller_of()
    webhook = Webhook(("127.0.0.1", 0), "controller.svc", controller.evicted, controller.api, clock)
    with contextlib.closing(webhook):
        webhook.start()
        waits_for(api, lambda: trusts() == 1)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
        with capture_logs() as logs:
            clock.advance(61 * 86400)
            waits_for(
                api, lambda: clock.advance(60) is None and "webhook.not_renewed" in [one["event"] for one in logs]
            )
        monkeypatch.setattr(tempfile, "tempdir", None)
        waits_for(api, lambda: clock.advance(60) is None and trusts() == 2)


def waits_for(api: KubernetesApi, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        with api.news:
            api.news.wait(0.02)


def test_an_api_server_that_is_away_changes_nothing_and_is_found_again(
    api: KubernetesApi, parts: ClusterParts, clock: FakeClock, controller_of: Start, vms: Create
) -> None:
    controller_of()
    vms("db")
    parts.until(lambda: is_running(api))
    failed: list[str] = []

    def refuse(asked: Asked) -> None:
        if len(failed) < 8:
            failed.append(asked.method)
            raise Refused(503, "ServiceUnavailable", "it starts")

    api.before = refuse
    api.forget_history()
    patch(api, state="Stopped")
    parts.until(lambda: passes(clock, parts, 1) and not pods(api))
    assert len(failed) == 8


def copied(api: KubernetesApi, nodes: tuple[str, ...]) -> None:
    """The virtual machine vm0 with its pod and its budget 499 times more, under other names and on all nodes."""
    found = {plural: json.dumps(api.all(plural)[0]) for plural in ("virtualmachines", "pods", "poddisruptionbudgets")}
    own = [json.loads(one)["metadata"]["uid"] for one in found.values()]
    for number in range(1, 500):
        for plural, one in found.items():
            text = one.replace("vm0", f"vm{number}").replace('"n1"', f'"{nodes[number % len(nodes)]}"')
            for uid in own:
                text = text.replace(uid, f"{uid}-{number}")
            api.put(plural, json.loads(text))


class NodeOfMany(Virtshim):
    """Fifty virtual machines, each in its pod."""

    def __init__(self, api: KubernetesApi, node: str) -> None:
        here = [one for one in api.all("pods") if one["spec"]["nodeName"] == node]
        names = [(one["metadata"]["labels"]["virtshim.io/vm"], one["metadata"]["name"]) for one in here]
        super().__init__([lasting(name=vm, pod=f"shop/{pod}") for vm, pod in names])


@contextlib.contextmanager
def agents_of(api: KubernetesApi, clock: FakeClock) -> Iterator[list[Agent]]:
    config = api.kubeconfig()
    made = [
        Agent(node, "virtshim-cluster", lambda: access(config), clock, NodeOfMany(api, node).open) for node in TEN_NODES
    ]
    with contextlib.ExitStack() as closing:
        for one in made:
            closing.callback(one.close)
            one.start()
        yield made


def test_five_hundred_idle_virtual_machines_ask_at_most_sixty_times_a_minute(
    api: KubernetesApi, clock: FakeClock, controller_of: Start, vms: Create
) -> None:
    """With ten nodes and their agents. A controller that starts with them writes nothing either."""
    parts = ClusterParts(api, TEN_NODES)
    first = controller_of()
    vms("vm0")
    parts.until(lambda: is_running(api, "vm0") and status(api, "vm0")["record"].get("node") == "n1")
    parts.until(lambda: condition(api, "Movable", "vm0") == ("True", "Movable"))
    api.edit("virtualmachines", "shop", "vm0", lambda one: one["status"].update(nodes={"n1": {}}))  # as its agent does
    first.close()
    copied(api, TEN_NODES)
    controller_of()
    with agents_of(api, clock) as agents:
        for agent in agents:
            agent.look()
        assert sum(len(agent.pods.all()) for agent in agents) == 500
        before = len(api.asked)
        for _ in range(0, FIVE_MINUTES, 20):
            clock.advance(20)
            for agent in agents:
                agent.look()
        # The server ends each watch after five minutes; the next one goes on from there.
        clock.advance(1)
        watches = 5 + 2 * len(agents)
        parts.until(lambda: sum("watch=true" in one for one in api.asked[before:]) == watches)
        asked = api.asked[before:]
    signs = [one for one in asked if "/leases/virtshim-agent." in one]
    assert len(signs) + watches == len(asked), [one for one in asked if one not in signs and "watch=true" not in one]
    assert len(asked) / 5 <= 60


def test_a_move_that_waits_for_another_one_begins_at_its_end(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, vms: Create
) -> None:
    controller_of(limits=MoveLimits(1, 1))
    for name in ("one", "two"):
        vms(name)
        parts.until(lambda name=name: is_running(api, name, "n1"))  # type: ignore[misc]
    for name in ("one", "two"):
        patch(api, name, moveTo="n2")
    parts.until(lambda: all(is_running(api, name, "n2") for name in ("one", "two")))
