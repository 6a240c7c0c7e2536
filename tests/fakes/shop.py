"""A namespace of a cluster, with VirtualMachines."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from fakes.control_planes import PODS, Document, Plane

from virtshim.cluster.api import BUDGETS, VMS, below

SMALL: Final = {"spec": {"containers": [{"name": "vm", "image": "small"}]}}
_EVENTS: Final = "/api/v1/events"


class Nodes(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...

    def until(self, condition: Callable[[], Any], seconds: float = 90.0) -> Any:
        """Lets everything go on until the condition holds, and returns what it returned."""


class Shop:
    def __init__(self, plane: Plane, nodes: Nodes) -> None:
        self.plane, self.nodes = plane, nodes
        self.name = plane.namespace()

    def create(self, name: str, template: Document = SMALL, **spec: Any) -> None:
        body = {"apiVersion": "virtshim.io/v1alpha1", "kind": "VirtualMachine", "metadata": {"name": name}}
        self.plane.admin.do("POST", below(VMS, self.name), {**body, "spec": {"template": template, **spec}})

    def patch(self, name: str, **spec: Any) -> None:
        self.plane.admin.do("PATCH", below(VMS, self.name, name), {"spec": spec})

    def vm(self, name: str) -> Document:
        """{} if it is gone."""
        answer = self.plane.admin.ask("GET", below(VMS, self.name, name))
        return answer.document if answer.status == 200 else {}

    def status(self, name: str) -> Document:
        found: Document = self.vm(name).get("status", {})
        return found

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        found = [one for one in self.status(name).get("conditions", ()) if one["type"] == kind]
        return (found[0]["status"], found[0]["reason"]) if found else ("", "")

    def runs_on(self, name: str) -> str:
        """Its node, if it runs and has one pod."""
        found = self.status(name)
        is_settled = found.get("phase") == "Running" and len(self.pods(name)) == 1
        return found.get("nodeName", "") if is_settled else ""

    def started(self, name: str, template: Document = SMALL, **spec: Any) -> tuple[str, str]:
        """Creates it, and waits until its agent has said whether it can move. Returns its node, and the other one."""
        self.create(name, template, **spec)
        home: str = self.nodes.until(lambda: self.runs_on(name))
        self.nodes.until(lambda: self.condition(name, "Movable")[0] in ("True", "False"))
        (away,) = [one for one in self.nodes.names if one != home]
        return home, away

    def pods(self, name: str) -> list[Document]:
        return self.plane.admin.all(PODS, self.name, f"?labelSelector=virtshim.io%2Fvm%3D{name}")

    def budgets(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.plane.admin.all(BUDGETS, self.name)]

    def reasons(self) -> set[str]:
        return {one["reason"] for one in self.plane.admin.all(_EVENTS, self.name)}

    def evict(self, pod: str, query: str = "") -> tuple[int, str]:
        """Asks as `kubectl drain` does."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": self.name}}
        answer = self.plane.admin.ask("POST", below(PODS, self.name, pod, "eviction") + query, body)
        return answer.status, str(answer.document.get("message", ""))

    def evict_vm(self, name: str, query: str = "") -> tuple[int, str]:
        return self.evict(self.status(name).get("podName", ""), query)

    def kubectl(self, *words: str, program: tuple[str, ...] = ("kubectl",)) -> subprocess.CompletedProcess[str]:
        """While it runs, the cluster goes on."""
        argv = [*program, *words, "--kubeconfig", self.plane.admin.kubeconfig]
        done: list[subprocess.CompletedProcess[str]] = []

        def wait() -> None:
            done.append(subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200))

        thread = threading.Thread(target=wait)
        thread.start()
        self.nodes.until(lambda: not thread.is_alive(), 210)
        return done[0]

    def drain(self, node: str, seconds: int = 120) -> subprocess.CompletedProcess[str]:
        return self.kubectl("drain", node, "--ignore-daemonsets", f"--timeout={seconds}s")

    def close(self) -> None:
        """Nothing of its VMs is left, whoever is still there to give them up."""
        admin = self.plane.admin
        for vm in admin.all(VMS, self.name):
            path = below(VMS, self.name, vm["metadata"]["name"])
            admin.ask("PATCH", path, {"metadata": {"finalizers": None}})
            admin.ask("DELETE", path)
        for pod in admin.all(PODS, self.name):
            admin.ask("DELETE", below(PODS, self.name, pod["metadata"]["name"]), {"gracePeriodSeconds": 0})
        admin.ask("DELETE", f"/api/v1/namespaces/{self.name}")
