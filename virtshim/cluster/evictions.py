"""What the webhook answers to an eviction of a pod. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from virtshim.cluster.moving import begins, progress, unmovable
from virtshim.cluster.values import Drain, Eviction, NodeSeen, PodSeen, VmSeen, named, seen_pod

# Seconds: the mark is written again when it is this old, so that not each of kubectl's requests is a write.
_REFRESHED_AFTER = 15.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`message`: why it is refused. `mark`: to be written into the VM's status before the answer is given, unless the request is
    a dry run."""

    allowed: bool
    message: str = ""
    mark: Eviction | None = None


ALLOWED = Answer(allowed=True)


def answer(
    vm: VmSeen | None,
    pod: PodSeen | None,
    pods: Sequence[PodSeen],
    nodes: Sequence[NodeSeen],
    now: float,
    wait: str = "",
) -> Answer:
    """`vm`: the one that the pod's label names. `wait`: why no move may begin now, see `virtshim.cluster.moving.crowded`."""
    if vm is None or pod is None or pod.owner != vm.uid or vm.deleting or pod.deleting or pod.is_over:
        return ALLOWED
    if not vm.record.names(pod.uid):
        return _left(vm, pod)
    if vm.record.target is not None:
        return _during_move(vm, pod, seen_pod(vm.record.pod, pods), seen_pod(vm.record.target, pods), nodes, now)
    if pod.has_moved or not pod.node:
        return _left(vm, pod)
    match vm.spec.drain:
        case Drain.BLOCK:
            return _refused(vm, "its spec.drain is Block; stop it (kubectl virt stop), or move it (kubectl virt move)")
        case Drain.RESTART:
            return ALLOWED
        case Drain.SAVE:
            return ALLOWED if pod.stop_saves else _refused(vm, _NOT_SAVED)
        case Drain.MOVE:
            pass
    return Answer(
        False, f"virtual machine {vm.name}: {_of_move(vm, pod, nodes, now, wait)}", _mark(vm, pod, nodes, now)
    )


_NOT_SAVED = (
    "its spec.drain is Save, but its pod was made when it was not, and would lose its memory; restart it "
    "(kubectl virt restart)"
)


def _left(vm: VmSeen, pod: PodSeen) -> Answer:
    """The VM does not run in the pod any more, or not yet. The controller deletes a pod that the VM has left. Until then, a
    budget would refuse without a reason."""
    return _refused(vm, "it has moved, and this pod ends") if vm.wants_budget and pod.node else ALLOWED


def _during_move(
    vm: VmSeen,
    pod: PodSeen,
    first: PodSeen | None,
    target: PodSeen | None,
    nodes: Sequence[NodeSeen],
    now: float,
) -> Answer:
    """`target`: None if it is not seen. It may be there all the same, as pods may be seen later than their VM."""
    has_arrived = target is not None and target.has_arrived
    if has_arrived or (first is not None and first.has_moved):
        # The first pod has nothing to lose any more; the other one is the VM's, and is asked about again when the record says so.
        return _left(vm, pod) if first is not None and pod.uid == first.uid else _refused(vm, "it arrives here")
    mark = None
    if vm.eviction is not None and first is not None and pod.uid == first.uid:
        mark = _again(vm.eviction, pod, named(nodes, pod.node), now)
    return Answer(False, f"virtual machine {vm.name}: {progress(target, 'it moves')}", mark)


def _of_move(vm: VmSeen, pod: PodSeen, nodes: Sequence[NodeSeen], now: float, wait: str) -> str:
    if begins(pod, nodes, now):
        return f"it starts, and moves then{f' ({pod.trouble})' if pod.trouble else ''}"
    if pod.has_volume:
        return "its state goes to its volume, and it continues on another node"
    if why := unmovable(pod, nodes, now):
        return f"it cannot move: {why}"
    if vm.pod_refusal is not None:
        return f"it tries again to move; the last try has failed: {vm.pod_refusal.why}"
    return wait or "it moves to another node"


def _mark(vm: VmSeen, pod: PodSeen, nodes: Sequence[NodeSeen], now: float) -> Eviction | None:
    node, had = named(nodes, pod.node), vm.eviction
    if had is None or had.pod != pod.uid or not had.counts(node, now):
        return Eviction(pod.uid, now, node is not None and node.cordoned)
    return _again(had, pod, node, now)


def _again(had: Eviction, pod: PodSeen, node: NodeSeen | None, now: float) -> Eviction | None:
    """The cordon may be seen later than the first request."""
    cordoned = had.cordoned or (node is not None and node.cordoned)
    if had.pod != pod.uid or (now < had.at + _REFRESHED_AFTER and cordoned == had.cordoned):
        return None
    return Eviction(pod.uid, now, cordoned)


def _refused(vm: VmSeen, why: str) -> Answer:
    return Answer(allowed=False, message=f"virtual machine {vm.name}: {why}")
