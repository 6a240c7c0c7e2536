"""Nodes with VMs, on any control plane. Each has the product's own agent, and what reacts to pods as kubelet and virtshim do.
They act while a test waits."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from fakes.control_planes import NAMESPACE, NODES, PODS, Document, Plane, until

from virtshim.cluster.agent import Agent
from virtshim.cluster.api import below
from virtshim.cri.operator_client import LastingVm, SavedMemory
from virtshim.guest.operation import Action
from virtshim.system.clock import SystemClock

_LEASES = "/apis/coordination.k8s.io/v1/leases"
# Seconds: kubelet's sign of life.
_SIGN = 10.0


class NodeVirtshim:
    """The admin socket of a node. `passthrough`: VMs with devices of the host, which cannot move."""

    def __init__(self, passthrough: set[str]) -> None:
        self.vms: dict[tuple[str, str], LastingVm] = {}
        self.paused: set[str] = set()
        self._passthrough = passthrough

    @contextlib.contextmanager
    def open(self) -> Iterator[NodeVirtshim]:
        yield self

    def lasting_vms(self) -> list[LastingVm]:
        return list(self.vms.values())

    def inspect(self, vm: str) -> dict[str, Any]:
        name = next((one.name for one in self.vms.values() if one.vm_id == vm), "")
        granted: Document = {"passthrough": [{}]} if name in self._passthrough else {}
        is_paused = vm in self.paused
        status = {"record": {"granted": granted}, "status": {"paused": is_paused}}
        return {"container": status, "vm": {"power": "paused" if is_paused else "running"}}

    def act(self, action: Action, vm: str, seconds: int = 0) -> tuple[bool, str]:
        self.paused = self.paused | {vm} if action is Action.PAUSE else self.paused - {vm}
        return True, ""

    def remove_vm(self, vm: LastingVm) -> str:
        del self.vms[vm.namespace, vm.name]
        return ""

    def take_vm(self, vm: LastingVm) -> str:
        self.change((vm.namespace, vm.name), undecided=False, comes_from="")
        return ""

    def change(self, key: tuple[str, str], **changes: Any) -> None:
        self.vms[key] = dataclasses.replace(self.vms[key], **changes)


class VmNodes:
    """`deaf`: VMs whose moves get stuck. `ran_on`: the nodes where a VM has run, in order. `booted`: how often it has, not
    continued."""

    def __init__(self, plane: Plane, names: tuple[str, ...]) -> None:
        self._plane = plane
        self.names = names
        self.deaf: set[str] = set()
        self.passthrough: set[str] = set()
        self.ran_on: dict[str, list[str]] = {}
        self.booted: dict[str, int] = {}
        self._volumes: set[str] = set()
        self._signed_at = 0.0
        self.virtshims = {name: NodeVirtshim(self.passthrough) for name in names}
        for name in names:
            self._join(name)
        self.users = {name: plane.user("virtshim-agent", name) for name in names}
        self.agents = [
            Agent(name, NAMESPACE, self.users[name].access, SystemClock(), self.virtshims[name].open) for name in names
        ]
        for agent in self.agents:
            agent.start()

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for name in self.names:
            self._plane.admin.ask("DELETE", f"{NODES}/{name}")

    def leave(self, node: str) -> None:
        """The node is gone from the cluster, and its agent with it."""
        (agent,) = [one for one in self.agents if one.node == node]
        agent.close()
        self.agents.remove(agent)
        self.names = tuple(one for one in self.names if one != node)
        self._plane.admin.do("DELETE", f"{NODES}/{node}")

    def cordon(self, node: str, *, is_cordoned: bool = True) -> None:
        self._plane.admin.do("PATCH", f"{NODES}/{node}", {"spec": {"unschedulable": is_cordoned}})

    def taint(self, node: str) -> None:
        """No room for anybody."""
        full = [{"key": "full", "effect": "NoSchedule"}]
        self._plane.admin.do("PATCH", f"{NODES}/{node}", {"spec": {"taints": full}})

    def until(self, condition: Callable[[], Any], seconds: float = 90.0) -> Any:
        """Lets everything go on until the condition holds, and returns what it returned."""
        return until(condition, self.act, seconds)

    def act(self) -> None:
        self._plane.act()
        if time.monotonic() > self._signed_at + _SIGN:
            for name in self.names:
                self._sign(name)
            self._signed_at = time.monotonic()
        for name in self.names:
            for pod in self._plane.admin.all(PODS, query=f"?fieldSelector=spec.nodeName%3D{name}"):
                self._settle(name, pod)
        for agent in self.agents:
            agent.look()

    # --- kubelet

    def _join(self, name: str) -> None:
        admin = self._plane.admin
        labels = {"virtshim.io/vms": "true", "kubernetes.io/hostname": name}
        admin.do("POST", NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
        self._sign(name)

    def _sign(self, name: str) -> None:
        admin, now = self._plane.admin, _now()
        room = {"cpu": "64", "memory": "256Gi", "pods": "1000"}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        admin.do("LISTS", f"{NODES}/{name}/status", {"status": status})
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now.replace("Z", ".000000Z")}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
        if admin.ask("PATCH", below(_LEASES, "kube-node-lease", name), {"spec": spec}).status == 404:
            admin.do("POST", below(_LEASES, "kube-node-lease"), lease)

    def _settle(self, node: str, pod: Document) -> None:
        vm = pod["metadata"].get("labels", {}).get("virtshim.io/vm", "")
        is_vm = any(one.get("kind") == "VirtualMachine" for one in pod["metadata"].get("ownerReferences", ()))
        if "deletionTimestamp" in pod["metadata"]:
            if is_vm:
                self._stop(node, vm, pod)
            self._say_gone(pod)
        elif pod["status"].get("phase", "Pending") == "Pending":
            if is_vm:
                self._run(node, vm, pod)
            self._say_running(pod)
        elif is_vm:
            self._go_on(node, vm, pod)
            if not _is_ready(pod) and _passes_gates(pod):
                self._say_running(pod)

    def _run(self, node: str, vm: str, pod: Document) -> None:
        metadata = pod["metadata"]
        key = metadata["namespace"], vm
        virtshim = self.virtshims[node]
        source = metadata.get("annotations", {}).get("virtshim.io/restore-from", "")
        had = virtshim.vms.get(key)
        continues = had is not None and had.saved is not None and not had.saved.taken
        if vm in self._volumes:
            self._volumes.discard(vm)
            continues = True
        if not source:
            self._runs_on(vm, node)
            self.booted[vm] = self.booted.get(vm, 0) + (not continues)
        virtshim.vms[key] = LastingVm(
            *key, "vm", time.time(), 1, f"{metadata['namespace']}/{metadata['name']}", f"p-{metadata['uid']}",
            f"c-{metadata['uid']}", None, "", source)  # fmt: skip

    def _go_on(self, node: str, vm: str, pod: Document) -> None:
        """The VM arrives, and its first node gives it away."""
        key = pod["metadata"]["namespace"], vm
        here = self.virtshims[node].vms.get(key)
        if here is None or not here.comes_from or vm in self.deaf:
            return
        self.virtshims[here.comes_from].change(key, moved_to=node)
        self.virtshims[node].change(key, comes_from="")
        self._runs_on(vm, node)

    def _runs_on(self, vm: str, node: str) -> None:
        if self.ran_on.setdefault(vm, [])[-1:] != [node]:
            self.ran_on[vm].append(node)

    def _stop(self, node: str, vm: str, pod: Document) -> None:
        """Its disk stays on the node, and its memory where the stop saves it."""
        key, uid = (pod["metadata"]["namespace"], vm), pod["metadata"]["uid"]
        virtshim, annotations = self.virtshims[node], pod["metadata"].get("annotations", {})
        here = virtshim.vms.get(key)
        if here is None or here.vm_id != f"c-{uid}":
            return
        if here.comes_from:
            del virtshim.vms[key]
            return
        if here.moved_to:
            virtshim.change(key, pod="", pod_id="", vm_id="")  # it stays, and says where the VM is
            return
        saves = annotations.get("virtshim.io/on-stop") == "save"
        if saves and "virtshim.io/state-volume" in annotations:
            self._volumes.add(vm)
            del virtshim.vms[key]
            return
        saved = SavedMemory(1 << 20, time.time(), time.time() + 3600, taken=False) if saves else None
        virtshim.change(key, pod="", pod_id="", vm_id="", saved=saved)

    def _say_gone(self, pod: Document) -> None:
        metadata = pod["metadata"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        self._plane.admin.ask("DELETE", below(PODS, metadata["namespace"], metadata["name"]), options)

    def _say_running(self, pod: Document) -> None:
        metadata, now = pod["metadata"], _now()
        container = {
            "name": pod["spec"]["containers"][0]["name"],
            "image": "small",
            "imageID": "",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": now}},
        }
        ready = {"type": "Ready", "status": "True" if _passes_gates(pod) else "False", "lastTransitionTime": now}
        status = {"phase": "Running", "containerStatuses": [container], "conditions": [ready]}
        path = below(PODS, metadata["namespace"], metadata["name"], "status")
        self._plane.admin.ask("LISTS", path, {"metadata": {"uid": metadata["uid"]}, "status": status})


def _passes_gates(pod: Document) -> bool:
    true = {one["type"] for one in pod["status"].get("conditions", ()) if one["status"] == "True"}
    return all(one["conditionType"] in true for one in pod["spec"].get("readinessGates", ()))


def _is_ready(pod: Document) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
