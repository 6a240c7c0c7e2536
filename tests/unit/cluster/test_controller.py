"""The controller runs, moves and removes VMs on an API server that guards its objects. A scheduler, kubelets and agents
answer it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from fakes.cluster_parts import ClusterParts
from fakes.kubernetes_api import Asked, KubernetesApi, Refused
from fakes.virtual_machines import condition, evict, is_running, patch, pods, reasons, status

from virtshim.cluster.controller import Controller
from virtshim.cluster.webhook import Webhook

Start = Callable[..., Controller]
Serve = Callable[[Controller], Webhook]
Create = Callable[..., dict[str, Any]]

STATE_VOLUME = {
    "metadata": {"annotations": {"virtshim.io/state-volume": "/state"}},
    "spec": {"containers": [{"name": "vm", "image": "small"}]},
}


def test_a_virtual_machine_runs_stops_and_goes(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, vms: Create
) -> None:
    controller_of()
    vms("db")
    parts.until(lambda: is_running(api))
    (pod,) = pods(api)
    assert pod["metadata"]["name"].startswith("db-")
    assert pod["spec"]["hostname"] == "db"
    assert [one["metadata"]["name"] for one in api.all("poddisruptionbudgets")] == ["virtshim-db"]
    patch(api, state="Stopped")
    parts.until(lambda: status(api)["phase"] == "Stopped" and not pods(api))
    patch(api, state="Running")
    parts.until(lambda: is_running(api))
    api.edit(
        "virtualmachines", "shop", "db", lambda one: one["metadata"].update(deletionTimestamp="2026-01-31T12:00:00Z")
    )
    parts.until(lambda: not api.all("virtualmachines"))
    assert (api.all("pods"), api.all("poddisruptionbudgets")) == ([], [])


def test_a_drain_moves_it_and_ends(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db")
    parts.until(lambda: is_running(api, node="n1"))
    (first,) = pods(api)
    parts.cordon("n1")
    said: list[str] = []

    def is_away() -> bool:
        answer = api.evict("shop", first["metadata"]["name"])
        said.append(answer.get("message", ""))
        return answer.get("code") == 404

    parts.until(is_away)
    parts.until(lambda: is_running(api, node="n2"))
    assert parts.ran_on["db"] == ["n1", "n2"]
    assert "it moves to another node" in said[0]
    assert {"Moves", "Moved"} <= reasons(api)


def test_both_pods_stay_while_it_moves_and_uncordon_stops_the_move(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db")
    parts.until(lambda: is_running(api, node="n1"))
    parts.deaf.add("db")
    parts.cordon("n1")
    assert evict(api)[0] == 429
    parts.until(lambda: "12 of 100 MiB" in status(api).get("moveProgress", ""))
    parts.until(lambda: evict(api)[0] == 429 and status(api)["eviction"]["cordoned"])
    assert [api.evict("shop", one["metadata"]["name"])["code"] for one in pods(api)] == [429, 429]
    assert status(api)["phase"] == "Moving"
    parts.cordon("n1", is_cordoned=False)
    parts.until(lambda: is_running(api, node="n1"))
    assert parts.ran_on["db"] == ["n1"]


def test_uncordon_stops_a_move_that_began_before_the_controller_saw_the_cordon(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db")
    parts.until(lambda: is_running(api, node="n1"))
    parts.deaf.add("db")
    assert evict(api)[0] == 429
    parts.until(lambda: status(api).get("phase") == "Moving")
    parts.cordon("n1")
    parts.until(lambda: evict(api)[0] == 429 and status(api)["eviction"]["cordoned"])
    parts.cordon("n1", is_cordoned=False)
    parts.until(lambda: is_running(api, node="n1"))
    assert parts.ran_on["db"] == ["n1"]


def test_a_first_node_that_dies_during_a_move_is_followed_by_a_boot_and_the_lost_memory_is_told(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, vms: Create
) -> None:
    controller_of()
    vms("db")
    parts.until(lambda: is_running(api, node="n1"))
    (first,) = pods(api)
    parts.deaf.add("db")
    patch(api, moveTo="n2")
    parts.until(lambda: "12 of 100 MiB" in status(api).get("moveProgress", ""))
    parts.cordon("n1")
    api.gone("pods", "shop", first["metadata"]["name"])
    parts.until(lambda: is_running(api, node="n2"))
    (event,) = [one for one in api.all("events") if one["reason"] == "MemoryLost"]
    assert (event["type"], "its memory is lost, and it boots" in event["message"]) == ("Warning", True)


def test_a_pod_whose_label_somebody_has_taken_away_gets_it_back(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, vms: Create
) -> None:
    """Without it neither the webhook nor the budget protects the pod, and the agent and the controller do not see it."""
    controller_of()
    vms("db")
    parts.until(lambda: is_running(api, node="n1"))
    (first,) = pods(api)
    api.edit("pods", "shop", first["metadata"]["name"], lambda one: one["metadata"].update(labels={"own": "yes"}))
    parts.until(lambda: pods(api) and is_running(api) and "PodLabelled" in reasons(api))
    (now,) = pods(api)
    assert now["metadata"]["uid"] == first["metadata"]["uid"]
    assert now["metadata"]["labels"] == {"own": "yes", "virtshim.io/vm": "db"}


def test_a_dry_run_changes_nothing(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db")
    parts.until(lambda: is_running(api))
    assert evict(api, dry_run=True)[0] == 429
    assert "eviction" not in status(api)


def test_no_room_leaves_it_where_it_is_with_the_schedulers_words(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db")
    parts.until(lambda: is_running(api, node="n1"))
    parts.full.add("n2")
    parts.cordon("n1")
    evict(api)
    parts.until(lambda: condition(api, "Draining") == ("True", "Unschedulable") and "Unschedulable" in reasons(api))
    assert "Insufficient memory" in evict(api)[1]
    assert parts.ran_on["db"] == ["n1"]


@pytest.mark.parametrize(
    ("spec", "code", "told"),
    [
        ({"drain": "Block"}, 429, "spec.drain is Block"),
        ({"drain": "Restart"}, 201, ""),
        ({"drain": "Save", "template": STATE_VOLUME}, 201, ""),
        ({"drain": "Move"}, 429, "cannot move: host devices (gpu0)"),
    ],
)
def test_each_kind_of_drain_is_answered(
    api: KubernetesApi,
    parts: ClusterParts,
    controller_of: Start,
    webhook_of: Serve,
    vms: Create,
    spec: dict[str, Any],
    code: int,
    told: str,
) -> None:
    webhook_of(controller_of())
    parts.unmovable["db"] = "host devices (gpu0)"
    vms("db", **spec)
    parts.until(lambda: is_running(api))
    parts.cordon("n1")
    found = evict(api)
    assert found[0] == code
    assert told in found[1]
    if code == 201:
        parts.until(lambda: is_running(api, node="n2"))


def test_a_state_volume_is_saved_to_and_restored_elsewhere(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db", template=STATE_VOLUME)
    parts.until(lambda: is_running(api, node="n1"))
    assert pods(api)[0]["metadata"]["annotations"]["virtshim.io/on-stop"] == "save"
    parts.cordon("n1")
    assert "its state goes to its volume" in evict(api)[1]
    parts.until(lambda: is_running(api, node="n2"))


def test_without_the_webhook_the_budget_refuses(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook = webhook_of(controller_of())
    vms("db")
    parts.until(lambda: is_running(api))
    webhook.close()
    assert evict(api) == (429, "Cannot evict pod as it would violate the pod's disruption budget.")


def test_a_webhook_that_is_slow_is_not_waited_for_and_the_budget_refuses(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db")
    parts.until(lambda: is_running(api))
    (shipped,) = api.one("validatingwebhookconfigurations", "", "virtshim-evictions")["webhooks"]
    assert shipped["timeoutSeconds"] <= 5
    impatient = {"webhooks": [{**shipped, "timeoutSeconds": 0.2}]}
    api.edit("validatingwebhookconfigurations", "", "virtshim-evictions", lambda one: one.update(impatient))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api.services["virtshim-cluster/virtshim-controller"] = silent.getsockname()[1]
        assert evict(api) == (429, "Cannot evict pod as it would violate the pod's disruption budget.")


def test_a_webhook_with_another_certificate_is_not_asked(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    controller = controller_of()
    webhook_of(controller)
    vms("db")
    parts.until(lambda: is_running(api))
    strange = {"clientConfig": {"caBundle": ""}}
    api.edit("validatingwebhookconfigurations", "", "virtshim-evictions", lambda one: one["webhooks"][0].update(
        clientConfig={**one["webhooks"][0]["clientConfig"], **strange["clientConfig"]}))  # fmt: skip
    assert "disruption budget" in evict(api)[1]


def test_two_controllers_trust_each_others_webhooks(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    first, second = controller_of(), controller_of()
    vms("db", drain="Block")
    parts.until(lambda: is_running(api))
    older = webhook_of(first)
    webhook_of(second)
    assert "spec.drain is Block" in evict(api)[1]
    api.services["virtshim-cluster/virtshim-controller"] = older.port
    assert "spec.drain is Block" in evict(api)[1]


def test_pods_of_others_may_go_and_are_never_touched(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, webhook_of: Serve, vms: Create
) -> None:
    webhook_of(controller_of())
    vms("db", drain="Restart")
    other = {"namespace": "shop", "name": "db-other", "labels": {"virtshim.io/vm": "db"}, "uid": "other"}
    api.put("pods", {"metadata": other, "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}})
    plain = {"namespace": "shop", "name": "plain", "labels": {}, "uid": "plain"}
    api.put("pods", {"metadata": plain, "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}})
    parts.until(lambda: status(api).get("phase") == "Running")
    assert "deletionTimestamp" not in api.one("pods", "shop", "db-other")["metadata"]
    assert [api.evict("shop", name)["code"] for name in ("plain", "db-other")] == [201, 201]


def test_move_to_moves_once(api: KubernetesApi, parts: ClusterParts, controller_of: Start, vms: Create) -> None:
    controller_of()
    vms("db")
    parts.until(lambda: is_running(api, node="n1"))
    patch(api, moveTo="n2")
    parts.until(lambda: is_running(api, node="n2") and status(api)["record"].get("movedTo") == "n2")


def test_a_watch_that_is_too_old_is_listed_again(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, vms: Create
) -> None:
    controller_of()
    vms("db")
    parts.until(lambda: is_running(api))
    api.forget_history()
    patch(api, state="Stopped")
    parts.until(lambda: not pods(api))


def test_a_template_that_the_api_server_refuses_is_told(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, vms: Create
) -> None:
    def refuse(asked: Asked) -> None:
        if asked.method == "POST" and asked.resource.plural == "pods":
            raise Refused(422, "Invalid", "spec.containers[0].image: Required value")

    api.before = refuse
    controller_of()
    vms("db")
    parts.until(lambda: "PodRefused" in reasons(api))
    (event,) = [one for one in api.all("events") if one["reason"] == "PodRefused"][:1]
    assert "image: Required value" in event["message"]


def test_a_deleted_object_gives_up_what_a_node_that_is_gone_keeps(
    api: KubernetesApi, parts: ClusterParts, controller_of: Start, vms: Create
) -> None:
    controller_of()
    vms("db", state="Stopped")
    parts.until(lambda: api.one("virtualmachines", "shop", "db")["metadata"].get("finalizers"))
    gone = {"deletionTimestamp": "2026-01-31T12:00:00Z"}
    kept = {"nodes": {"n9": {"savedAt": 10.0}}}
    api.edit("virtualmachines", "shop", "db", lambda one: (one["metadata"].update(gone), one["status"].update(kept)))
    parts.until(lambda: not api.all("virtualmachines") and "NodeGone" in reasons(api))
    (event,) = [one for one in api.all("events") if one["reason"] == "NodeGone"]
    assert "node n9 is gone" in event["message"]
