"""virtshim as a node's agent sees it, and the objects of its VM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fakes.kubernetes_api import KubernetesApi

from virtshim.cri.operator_client import LastingVm
from virtshim.guest.operation import Action
from virtshim.model.errors import Unavailable

RUNNING = {"container": {"record": {}, "status": {"paused": False}}, "vm": {"power": "running"}}
PAUSED = {"container": {"record": {}, "status": {"paused": True}}, "vm": {"power": "paused"}}


def lasting(**changes: Any) -> LastingVm:
    usual: dict[str, Any] = {
        "namespace": "shop",
        "name": "db",
        "container": "vm",
        "created": 1.0,
        "disk": 1,
        "saved": None,
    }
    return LastingVm(**{**usual, "pod": "shop/db-1", "pod_id": "p", "vm_id": "c", **changes})


@dataclass
class Virtshim:
    """`facts`: what it says of each VM. `done`: what it was told to do."""

    vms: list[LastingVm] = field(default_factory=lambda: [lasting()])
    facts: dict[str, Any] = field(default_factory=lambda: RUNNING)
    done: list[str] = field(default_factory=list)
    is_away: bool = False

    @contextlib.contextmanager
    def open(self) -> Iterator[Virtshim]:
        if self.is_away:
            raise Unavailable("there is no admin socket")
        yield self

    def lasting_vms(self) -> list[LastingVm]:
        return self.vms

    def inspect(self, vm: str) -> dict[str, Any]:
        return self.facts

    def act(self, action: Action, vm: str, seconds: int = 0) -> tuple[bool, str]:
        self.done.append(action.value)
        self.facts = PAUSED if action is Action.PAUSE else RUNNING
        return True, ""

    def remove_vm(self, vm: LastingVm) -> str:
        self.done.append("remove")
        self.vms = [one for one in self.vms if one != vm]
        return ""

    def take_vm(self, vm: LastingVm) -> str:
        self.done.append("take")
        self.vms = [replace(one, comes_from="", undecided=False) if one == vm else one for one in self.vms]
        return ""


def put_vm_with_pod(api: KubernetesApi) -> None:
    """VirtualMachine shop/db, whose pod db-1 runs on node n1."""
    template = {"spec": {"containers": [{"name": "vm", "image": "small"}]}}
    vm = {"namespace": "shop", "name": "db", "uid": "vm"}
    api.put("virtualmachines", {"kind": "VirtualMachine", "metadata": vm, "spec": {"template": template}})
    pod = {
        "namespace": "shop",
        "name": "db-1",
        "uid": "pod",
        "labels": {"virtshim.io/vm": "db"},
        "ownerReferences": [{"kind": "VirtualMachine", "name": "db", "uid": "vm", "controller": True}],
        "annotations": {},
    }
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    api.put("pods", {"kind": "Pod", "metadata": pod, "spec": {"nodeName": "n1"}, "status": status})
