"""The parts of a cluster that react to pods: a scheduler, and a kubelet with an agent on each node. They act while a
test waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fakes.kubernetes_api import Document, KubernetesApi

_NAMESPACE = "virtshim-cluster"


class Scheduler:
    """`full`: nodes without room."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self.full: set[str] = set()

    def act(self) -> None:
        for pod in self._api.all("pods"):
            is_waiting = not pod["spec"].get("nodeName") and not pod["spec"].get("schedulingGates")
            if is_waiting and "deletionTimestamp" not in pod["metadata"]:
                self.place(pod)

    def place(self, pod: Document) -> None:
        nodes = sorted(self._api.all("nodes"), key=lambda one: str(one["metadata"]["name"]))
        names = [one["metadata"]["name"] for one in nodes if _takes_pods(one)]
        names = [one for one in names if one not in self.full and _may_run_on(pod, one)]
        key = pod["metadata"]["namespace"], pod["metadata"]["name"]
        if names:
            rather = [one for one in names if one in _preferred(pod)]
            self._api.edit("pods", *key, lambda one: _bind(one, [*rather, *names][0]))
            return
        words = f"0/{len(nodes)} nodes are available: Insufficient memory"
        if _condition(pod, "PodScheduled") != "False":
            self._api.edit("pods", *key, lambda one: _say(one, "PodScheduled", "False", "Unschedulable", words))


class ClusterParts:
    """`unmovable`: why the VMs of the nodes cannot move, by VM; `full`: nodes without room; `deaf`: VMs whose moves get stuck."""

    def __init__(self, api: KubernetesApi, nodes: tuple[str, ...] = ("n1", "n2")) -> None:
        self.api = api
        self._scheduler = Scheduler(api)
        self.full = self._scheduler.full
        self.deaf: set[str] = set()
        self.unmovable: dict[str, str] = {}
        # The nodes where a VM has run, in order.
        self.ran_on: dict[str, list[str]] = {}
        for name in nodes:
            conditions = [{"type": "Ready", "status": "True"}]
            api.put("nodes", {"metadata": {"name": name}, "spec": {}, "status": {"conditions": conditions}})
            self.agent_sign(name)

    def agent_sign(self, node: str, ago: float = 0.0) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime(self.api.clock.now_ns() / 1e9 - ago))
        lease = {"metadata": {"namespace": _NAMESPACE, "name": f"virtshim-agent.{node}"}, "spec": {"renewTime": at}}
        self.api.put("leases", lease)

    def cordon(self, node: str, *, is_cordoned: bool = True) -> None:
        self.api.edit("nodes", "", node, lambda one: one["spec"].update(unschedulable=is_cordoned))

    def until(self, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        """Lets everything go on until the condition holds, and returns what it returned."""
        end = time.monotonic() + seconds
        while True:
            before = self.api.version
            if found := condition():
                return found
            assert time.monotonic() < end, "it has not come about"
            self.act()
            with self.api.news:
                # The version tells whether there are news since the condition was looked at.
                self.api.news.wait_for(lambda: self.api.version != before, 0.05)  # noqa: B023

    def act(self) -> None:
        for pod in self.api.all("pods"):
            if pod["metadata"].get("labels", {}).get("virtshim.io/vm"):
                self._act(pod)

    def _act(self, pod: Document) -> None:
        metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
        namespace, name = metadata["namespace"], metadata["name"]
        if "deletionTimestamp" in metadata:
            self.api.gone("pods", namespace, name)
        elif spec.get("schedulingGates"):
            return
        elif not spec.get("nodeName"):
            self._scheduler.place(pod)
        elif status["phase"] == "Pending" or _condition(pod, "virtshim.io/arrived") == "False":
            self._run(pod)

    def _run(self, pod: Document) -> None:
        vm, node = pod["metadata"]["labels"]["virtshim.io/vm"], pod["spec"]["nodeName"]
        key = pod["metadata"]["namespace"], pod["metadata"]["name"]
        source = pod["metadata"].get("annotations", {}).get("virtshim.io/restore-from")
        if source and _condition(pod, "virtshim.io/arrived") is None:
            self.api.edit(
                "pods", *key, lambda one: _say(one, "virtshim.io/arrived", "False", "Moving", "12 of 100 MiB")
            )
            return
        if source and vm in self.deaf:
            return
        for first in self.api.all("pods") if source else ():
            if (
                first["metadata"].get("labels", {}).get("virtshim.io/vm") == vm
                and first["spec"].get("nodeName") == source
            ):
                own = first["metadata"]["namespace"], first["metadata"]["name"]
                self.api.edit("pods", *own, lambda one: _say(one, "virtshim.io/moved", "True", "Moved", node))
        if self.ran_on.setdefault(vm, [])[-1:] != [node]:
            self.ran_on[vm].append(node)
        self.api.edit("pods", *key, lambda one: self._runs(one, vm, arrived=bool(source)))

    def _runs(self, pod: Document, vm: str, *, arrived: bool) -> None:
        pod["status"]["phase"] = "Running"
        pod["status"]["containerStatuses"] = [{"name": "vm", "state": {"running": {}}}]
        why = self.unmovable.get(vm, "")
        _say(pod, "virtshim.io/movable", "False" if why else "True", "HostDevices" if why else "Movable", why)
        if arrived:
            _say(pod, "virtshim.io/arrived", "True", "Arrived", "")
        _say(pod, "Ready", "True", "", "")


def _bind(pod: Document, node: str) -> None:
    pod["spec"]["nodeName"] = node
    _say(pod, "PodScheduled", "True", "", "")


def _takes_pods(node: Document) -> bool:
    """None of the pods here tolerates anything."""
    spec = node.get("spec", {})
    taints = spec.get("taints", ())
    return not spec.get("unschedulable") and not any(one["effect"] == "NoSchedule" for one in taints)


def _preferred(pod: Document) -> set[str]:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
    return {name for term in terms for field in term["preference"].get("matchFields", ()) for name in field["values"]}


def _may_run_on(pod: Document, node: str) -> bool:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", ())
    return all(
        (node in field["values"]) == (field["operator"] == "In")
        for term in terms
        for field in term.get("matchFields", ())
    )


def _condition(pod: Document, kind: str) -> str | None:
    return next((one["status"] for one in pod["status"].get("conditions", ()) if one["type"] == kind), None)


def _say(pod: Document, kind: str, status: str, reason: str, message: str) -> None:
    others = [one for one in pod["status"].get("conditions", ()) if one["type"] != kind]
    pod["status"]["conditions"] = [*others, {"type": kind, "status": status, "reason": reason, "message": message}]
