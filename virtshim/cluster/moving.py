"""Who asks for a move, and what is in its way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.cluster.values import Drain, NodeSeen, PodSeen, VmSeen, named

IS_PAUSED: Final = "it is paused, and moves when it runs again"


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """Moves at once: in the cluster, and from one node."""

    in_all: int = 5
    from_node: int = 2


@dataclass(frozen=True, slots=True)
class Move:
    """`to`: the name of a node; "" for any other one."""

    why: str
    to: str = ""


def wanted_move(vm: VmSeen, pod: PodSeen | None, nodes: Sequence[NodeSeen], now: float) -> Move | None:
    """None if nobody asks for one now. `pod`: the one that the VM runs in. An eviction comes before a request of the spec, as the
    node is to be empty."""
    if pod is None or not pod.node or vm.deleting or not vm.spec.wants_pod:
        return None
    asked = vm.eviction
    is_evicted = asked is not None and asked.pod == pod.uid and asked.counts(named(nodes, pod.node), now)
    if is_evicted and vm.spec.drain is Drain.MOVE:
        return Move(f"node {pod.node} is drained")
    to = vm.spec.move_to
    if to and to not in (vm.record.moved_to, pod.node) and named(nodes, to) is not None:
        return Move(f"spec.moveTo is {to}", to)
    return None


def unmovable(pod: PodSeen, nodes: Sequence[NodeSeen], now: float) -> str:
    """Why the VM cannot move while it runs, "" if it can."""
    if pod.has_volume:
        return "a virtual machine with a state volume is saved there instead"
    if pod.is_paused:  # the agent may have paused it a moment after it has said that it can move
        return IS_PAUSED
    if pod.movable is not None and not pod.movable.is_true:
        return pod.movable.message or pod.movable.reason
    if not _agent_answers(pod, nodes, now):
        return f"the agent of node {pod.node} does not say whether it can move; see `virtshim agent` there"
    return "" if pod.movable is not None else f"the agent of node {pod.node} has not said yet whether it can move"


def begins(pod: PodSeen, nodes: Sequence[NodeSeen], now: float) -> bool:
    """Whether the VM starts, and will soon be able to move, or to say why it cannot."""
    is_young = pod.movable is None and not pod.has_volume and _agent_answers(pod, nodes, now)
    return not pod.runs or is_young


def _agent_answers(pod: PodSeen, nodes: Sequence[NodeSeen], now: float) -> bool:
    node = named(nodes, pod.node)
    return node is not None and not node.agent_is_silent(now)


def crowded(vm: VmSeen, pod: PodSeen | None, moving: Iterable[PodSeen], limits: MoveLimits) -> str:
    """Why the VM's move has to wait, "" if it has not. `moving`: the first pods of the other VMs that move now."""
    others = list(moving)
    if vm.record.target is not None or pod is None:
        return ""
    if len(others) >= limits.in_all:
        return f"it waits: {len(others)} virtual machines of the cluster move now"
    here = sum(one.node == pod.node for one in others)
    return f"it waits: {here} virtual machines move from node {pod.node} now" if here >= limits.from_node else ""


def progress(target: PodSeen | None, held_up: str) -> str:
    """How the move goes, in words; "" without a move. `held_up`: why it does not begin."""
    if target is None:
        return held_up
    if target.unplaced:
        return f"no node has room for it: {target.unplaced}"
    # What its agent has said before a container ended is old.
    if target.trouble and not target.is_undecided:
        # kubelet tells only in the pod's events why it cannot make a sandbox.
        more = f"; see kubectl describe pod {target.name}" if target.trouble == "ContainerCreating" else ""
        return f"it moves to node {target.node}: {target.trouble}{more}"
    if target.arrived is not None and (target.arrived.message or target.arrived.reason):
        return f"it moves to node {target.node}: {target.arrived.message or target.arrived.reason}"
    to = target.node or target.move_to
    return f"it moves from node {target.restore_from} to {f'node {to}' if to else 'a node that has room'}"
