"""A VirtualMachine's status, for people. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from virtshim.cluster.moving import begins, progress, unmovable, wanted_move
from virtshim.cluster.values import NodeSeen, PodSeen, State, VmSeen, named

# Seconds after a pod's end within which its node's agent says what was saved.
TOLD_WITHIN: Final = 10.0


@dataclass(frozen=True, slots=True)
class Told:
    """A condition of the VM. `status`: True, False, Unknown."""

    type: str
    status: str
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """`saved_on`: the node with the newest saved memory, "" for none."""

    phase: str
    pod: str
    node: str
    progress: str
    saved_on: str
    waits_for_restart: bool
    conditions: tuple[Told, ...]


def fingerprint(template: Mapping[str, Any]) -> str:
    """Of a template, for the pods that are made from it."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]


def shown(
    vm: VmSeen, pod: PodSeen | None, target: PodSeen | None, nodes: Sequence[NodeSeen], now: float, waits: str
) -> Shown:
    """`waits`: why it has no pod although it is to have one."""
    ready = _ready(vm, pod, nodes, now, waits)
    saved = vm.saved
    draining = _draining(vm, pod, target, nodes, now)
    return Shown(
        phase=_phase(vm, pod, target, ready),
        pod=pod.name if pod is not None else "",
        node=pod.node if pod is not None else "",
        progress=draining.message if target is not None else "",
        saved_on=max(saved, key=lambda name: saved[name].saved_at, default=""),
        waits_for_restart=pod is not None and bool(pod.template) and pod.template != fingerprint(vm.spec.template),
        conditions=(ready, _movable(pod, nodes, now), _saved(vm, pod, now), draining, _protected(vm)),
    )


def _phase(vm: VmSeen, pod: PodSeen | None, target: PodSeen | None, ready: Told) -> str:
    if vm.deleting:
        return "Deleting"
    if pod is None:
        if vm.spec.wants_pod:
            return "Pending"
        return "Saved" if vm.saved else "Stopped"
    if pod.deleting:
        return "Stopping"
    if ready.status == "Unknown":
        return "Unknown"
    if target is not None:
        return "Moving"
    if pod.is_paused:
        return "Paused"
    if not pod.node:
        return "Pending"
    return "Running" if pod.runs else "Starting"


def _ready(vm: VmSeen, pod: PodSeen | None, nodes: Sequence[NodeSeen], now: float, waits: str) -> Told:
    if pod is None:
        return _without_pod(vm, waits)
    if pod.node:
        node = named(nodes, pod.node)
        if node is None or not node.ready:
            return Told("Ready", "Unknown", "NodeSilent", f"node {pod.node} does not answer")
        if node.agent_is_silent(now):
            text = f"the agent of node {pod.node} does not answer; the virtual machine runs on without it"
            return Told("Ready", "Unknown", "AgentSilent", text)
    elif pod.unplaced:
        return Told("Ready", "False", "Unschedulable", pod.unplaced)
    if pod.deleting:
        return Told("Ready", "False", "Stopping", f"pod {pod.name} ends: {_end_of(pod)}")
    if pod.paused is not None and pod.paused.is_true:
        return Told("Ready", "False", "Paused", pod.paused.message)
    if pod.ready:
        return Told("Ready", "True", "PodReady")
    return Told("Ready", "False", "PodNotReady", pod.trouble)


def _without_pod(vm: VmSeen, waits: str) -> Told:
    if waits:
        return Told("Ready", "False", "Waits", waits)
    if vm.pod_refusal is not None and vm.spec.wants_pod and not vm.deleting:
        return Told("Ready", "False", "PodRefused", vm.pod_refusal.why)
    return Told("Ready", "False", "NoPod")


def _end_of(pod: PodSeen) -> str:
    if not pod.stop_saves:
        return "the guest shuts down"
    return "its state goes to its volume" if pod.has_volume else "its memory is saved on its node"


def _movable(pod: PodSeen | None, nodes: Sequence[NodeSeen], now: float) -> Told:
    if pod is None or not pod.runs:
        return Told("Movable", "False", "NotRunning")
    why = unmovable(pod, nodes, now)
    if not why:
        return Told("Movable", "True", "Movable")
    if pod.has_volume:
        return Told("Movable", "False", "StateVolume", why)
    if pod.is_paused:
        return Told("Movable", "False", "Paused", why)
    if pod.movable is None or pod.movable.is_true:
        return Told("Movable", "Unknown", "NotSaid", why)
    return Told("Movable", "False", pod.movable.reason or "NotMovable", why)


def _saved(vm: VmSeen, pod: PodSeen | None, now: float) -> Told:
    if vm.saved:
        return Told("Saved", "True", "MemorySaved")
    if vm.spec.state is State.SAVED and pod is None:
        if now < vm.record.ended_at + TOLD_WITHIN:
            text = f"the agent of node {vm.record.node} has not said yet whether its memory was saved"
            return Told("Saved", "Unknown", "NotSaid", text)
        text = "its memory was not saved; the log of its last container says why"
        return Told("Saved", "False", "NotSaved", text)
    if vm.spec.state is State.SAVED and pod is not None and not pod.stop_saves:
        text = "its pod was made without virtshim.io/on-stop: save, so that it shuts down"
        return Told("Saved", "False", "StopDoesNotSave", text)
    return Told("Saved", "False", "NoMemory")


def _draining(vm: VmSeen, pod: PodSeen | None, target: PodSeen | None, nodes: Sequence[NodeSeen], now: float) -> Told:
    move = wanted_move(vm, pod, nodes, now)
    if target is not None:
        reason = "Unschedulable" if target.unplaced else "Moving"
        return Told("Draining", "True", reason, progress(target, ""))
    if pod is None or move is None:
        asked = vm.spec.move_to
        if asked and asked != vm.record.moved_to and named(nodes, asked) is None:
            return Told("Draining", "False", "NoSuchNode", f"spec.moveTo: the cluster has no node {asked}")
        return Told("Draining", "False", "NotAsked")
    if pod.has_volume:
        return Told("Draining", "True", "Saving", f"{move.why}: it is saved on its volume")
    if begins(pod, nodes, now):
        return Told("Draining", "True", "Starting", f"{move.why}: it starts, and moves then")
    if why := unmovable(pod, nodes, now):
        return Told("Draining", "False", "CannotMove", f"{move.why}, and it cannot move: {why}")
    if vm.pod_refusal is not None:
        return Told("Draining", "True", "TriesAgain", f"{move.why}; the last try has failed: {vm.pod_refusal.why}")
    return Told("Draining", "True", "Waiting", f"{move.why}: it moves as soon as it may")


def _protected(vm: VmSeen) -> Told:
    """Whether evictions are refused while the controller does not answer."""
    if not vm.wants_budget:
        return Told("Protected", "False", "NotWanted")
    if vm.has_budget:
        return Told("Protected", "True", "Budget")
    if vm.budget_refusal is None:
        return Told("Protected", "False", "NoBudget")
    text = f"{vm.budget_refusal.why}; until then an eviction ends its pod while the controller does not answer"
    return Told("Protected", "False", "BudgetRefused", text)
