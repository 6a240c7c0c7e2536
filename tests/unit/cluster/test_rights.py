"""The manifests give the cluster's programs enough rights, and no more than they need."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fakes.cluster_parts import ClusterParts
from fakes.cluster_rights import ShippedRights
from fakes.kubernetes_api import RESOURCES, Asked, KubernetesApi, Refused

from virtshim.cluster.controller import Controller
from virtshim.cluster.webhook import Webhook

CONTROLLER = "system:serviceaccount:virtshim-cluster:virtshim-controller"
OWNER = {"apiVersion": "virtshim.io/v1alpha1", "kind": "VirtualMachine", "name": "db", "uid": "1", "controller": True}


def ask(api: KubernetesApi, user: str, method: str, path: str, body: Any = None) -> Any:
    """`path`: PLURAL/NAMESPACE/NAME, and a subresource."""
    plural, namespace, name, sub = (*path.split("/"), "")[:4]
    (resource,) = [one for one in RESOURCES if one.plural == plural]
    return api.answer(Asked(method, resource, namespace, name, sub, {}, body, user))


def test_the_controller_needs_every_right_that_it_has(
    api: KubernetesApi,
    parts: ClusterParts,
    rights: ShippedRights,
    controller_of: Callable[..., Controller],
    webhook_of: Callable[[Controller], Webhook],
    vms: Callable[..., Any],
) -> None:
    """One life of a VirtualMachine uses all of them. The fake API server does not ask for virtualmachines/finalizers."""
    webhook_of(controller_of())
    vms("db")
    parts.until(lambda: api.one("virtualmachines", "shop", "db").get("status", {}).get("phase") == "Running")
    api.edit("virtualmachines", "shop", "db", lambda one: one["spec"].update(moveTo="n2", drain="Restart"))
    parts.until(lambda: api.one("virtualmachines", "shop", "db")["status"].get("nodeName") == "n2")
    parts.until(lambda: len(api.all("pods")) == 1 and not api.all("poddisruptionbudgets"))
    (pod,) = api.all("pods")
    api.gone("pods", "shop", pod["metadata"]["name"])
    parts.until(lambda: [one for one in api.all("pods") if one["metadata"]["uid"] != pod["metadata"]["uid"]])
    needed = rights.used[CONTROLLER] | {("update", "virtualmachines/finalizers")}
    assert rights.granted(CONTROLLER) == needed


POD: dict[str, Any] = {
    "metadata": {"namespace": "shop", "name": "db-1", "labels": {"virtshim.io/vm": "db"}, "ownerReferences": [OWNER]},
    "spec": {"runtimeClassName": "virtshim"},
    "status": {"phase": "Pending"},
}


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("GET", "secrets/shop/key", None, "cannot get resource"),
        ("DELETE", "nodes//n1", None, "cannot delete resource"),
        ("DELETE", "pods/shop/web", None, "only what belongs to a VirtualMachine"),
        ("PATCH", "pods/shop/web", {"metadata": {"labels": {"a": "b"}}}, "only what belongs to a VirtualMachine"),
        ("POST", "pods/shop/", {**POD, "metadata": {"name": "x"}}, "only what belongs to a VirtualMachine"),
        ("POST", "pods/shop/", {**POD, "spec": {}}, "only pods that are virtual machines"),
        ("POST", "pods/shop/", {**POD, "spec": {"runtimeClassName": "runc"}}, "only pods that are virtual machines"),
        ("DELETE", "poddisruptionbudgets/shop/web", None, "only what belongs to a VirtualMachine"),
        ("PATCH", "validatingwebhookconfigurations//other", {}, "cannot patch resource"),
    ],
)
def test_the_controller_may_not_touch_anything_else(
    api: KubernetesApi, rights: ShippedRights, method: str, path: str, body: Any, told: str
) -> None:
    api.put("nodes", {"metadata": {"name": "n1"}, "spec": {}})
    for plural in ("pods", "poddisruptionbudgets"):
        api.put(plural, {"metadata": {"namespace": "shop", "name": "web"}, "spec": {}, "status": {"phase": "Running"}})
    with pytest.raises(Refused, match=told):
        ask(api, CONTROLLER, method, path, body)
    rights.refused.clear()


def test_its_own_pods_are_the_controllers(api: KubernetesApi) -> None:
    ask(api, CONTROLLER, "POST", "pods/shop/", POD)
    ask(api, CONTROLLER, "PATCH", "pods/shop/db-1", {"metadata": {"annotations": {"at": str(time.time())}}})
    ask(api, CONTROLLER, "DELETE", "pods/shop/db-1")
    assert api.all("pods") == []
