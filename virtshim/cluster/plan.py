"""Decides the next step for a VirtualMachine, from what the controller sees. Pure.

What the controller sees may be old, and the controller may be killed after any step, or run twice. Even then, two pods must never
run the VM. These rules prevent it:

- A pod is created behind a gate. Only a pod that the VM's record names loses its gate, and a change of the record fails if the VM
  has changed since.
- The record drops a pod only when the pod has ended, or the API server says that the pod is gone.
- The exception is a move. The record then names a second pod, which can run the VM only if the first pod's node gives it away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from virtshim.cluster.moving import IS_PAUSED, Move, unmovable, wanted_move
from virtshim.cluster.status import TOLD_WITHIN, Shown, fingerprint, shown
from virtshim.cluster.steps import (
    AskToPause,
    Create,
    Delete,
    Forget,
    Note,
    Place,
    SetBudget,
    SetFinalizer,
    Step,
    Ungate,
)
from virtshim.cluster.values import NodeSeen, PodSeen, Record, State, VmSeen, named, refused_again, seen_pod

# Seconds for which a gated pod that a killed controller left is still used. An older pod was made for another situation.
_USED_WITHIN = 60.0
# Seconds that a pod must have lasted for its end to be no failure; and until the next try after failures.
_LASTED = 600.0
_FIRST_DELAY = 10.0
_LONGEST_DELAY = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`step`: None if nothing is to be done now. `shown`: the status for people. `again_at`: when to plan again although nothing
    has changed, in seconds since the epoch; None: never."""

    step: Step | None
    shown: Shown
    again_at: float | None


def plan(vm: VmSeen, pods: Sequence[PodSeen], nodes: Sequence[NodeSeen], now: float, crowded: str = "") -> Plan:
    """`pods`: those of the VM's namespace with its label. `crowded`: why no move may begin now, "" if one may."""
    view = _View(vm, tuple(one for one in pods if one.owner == vm.uid), tuple(nodes), now, crowded)
    step = _next(view)
    return Plan(step, shown(vm, view.pod or view.target, view.target, nodes, now, view.waits), _again_at(view))


@dataclass(frozen=True, slots=True)
class _View:
    vm: VmSeen
    pods: tuple[PodSeen, ...]
    nodes: tuple[NodeSeen, ...]
    now: float
    crowded: str

    @property
    def record(self) -> Record:
        return self.vm.record

    @property
    def pod(self) -> PodSeen | None:
        return seen_pod(self.record.pod, self.pods)

    @property
    def target(self) -> PodSeen | None:
        return seen_pod(self.record.target, self.pods)

    @property
    def others(self) -> tuple[PodSeen, ...]:
        return tuple(one for one in self.pods if not self.record.names(one.uid))

    @property
    def move(self) -> Move | None:
        return wanted_move(self.vm, self.pod, self.nodes, self.now)

    @property
    def boots_anew(self) -> bool:
        return self.vm.spec.restarted_at != self.record.restarted_at

    @property
    def keeper(self) -> str:
        """The node with a saved memory that the next pod needs, "" if there is none. A restart gives up the memory of a node
        that is gone."""
        if self.vm.spec.has_volume:
            return ""
        saved = {
            name: kept
            for name, kept in self.vm.saved.items()
            if kept.lapses_at > self.now and not (self.boots_anew and named(self.nodes, name) is None)
        }
        return max(saved, key=lambda name: saved[name].saved_at, default="")

    @property
    def awaits_word(self) -> bool:
        """Whether the last node's agent may not have said yet that the last stop has saved the memory. The next pod has to
        run where that memory is."""
        spec = self.vm.spec
        return spec.stop_saves and not spec.has_volume and not self.vm.saved and self.now < self.told_at

    @property
    def told_at(self) -> float:
        return self.record.ended_at + TOLD_WITHIN

    @property
    def bound_to(self) -> str:
        """The only node for the next pod, "" if any will do."""
        wanted = self.vm.spec.move_to
        if wanted and wanted != self.record.moved_to:
            return wanted
        return self.keeper or (self.record.node if self.vm.spec.stay_on_node else "")

    @property
    def waits(self) -> str:
        """Why no pod is made now although one is wanted, "" if one is."""
        if self.record.pod is not None or not self.vm.spec.wants_pod or self.vm.deleting:
            return ""
        if (bound := self.bound_to) and named(self.nodes, bound) is None:
            return (
                f"it has to run on node {bound}, which the cluster does not have; clear spec.stayOnNode and spec.moveTo, or "
                "restart the virtual machine to give a saved memory up (kubectl virt restart)"
            )
        if self.awaits_word:
            return f"the agent of node {self.record.node} has not said yet whether the last pod's memory is saved there"
        if self.now < self.next_try:
            return f"its last pods ended soon after their start ({self.record.failures} in a row); the next one follows"
        if self.others and not all(_is_new(one) for one in self.others):
            return f"pod {next(one.name for one in self.others if not _is_new(one))} has not ended yet"
        return ""

    @property
    def pod_has_to_wait(self) -> bool:
        """Whether the API server has refused the next pod just now, or a move has failed."""
        return self.vm.waits_to_try(self.record.pod_refusal, self.now)

    @property
    def next_try(self) -> float:
        if not self.record.failures:
            return 0.0
        delay = _FIRST_DELAY * 2.0 ** min(self.record.failures - 1, 10)
        return self.record.ended_at + min(_LONGEST_DELAY, delay)


def _is_new(pod: PodSeen) -> bool:
    return pod.gated and not pod.deleting


def _next(view: _View) -> Step | None:
    return next((step for rule in _RULES if (step := rule(view)) is not None), None)


# --- the rules, in the order in which they are asked


def _finalizer(view: _View) -> Step | None:
    return SetFinalizer(exists=True) if not view.vm.has_finalizer and not view.vm.deleting else None


def _budget(view: _View) -> Step | None:
    """While somebody else's budget has the name, the VM goes on without one, and its status says so."""
    vm, refusal = view.vm, view.record.budget_refusal
    if vm.wants_budget and not vm.has_budget:
        return None if vm.waits_to_try(refusal, view.now) else SetBudget(exists=True)
    if vm.has_budget and not vm.wants_budget:
        return SetBudget(exists=False)
    return Note(view.record.replace(budget_refusal=None)) if refusal is not None else None


def _arrived(view: _View) -> Step | None:
    """The move is over: from now on the target is the VM's pod, and the rules for leftovers delete the first one."""
    target = view.target
    if target is None or not target.has_arrived:
        return None
    done = view.record.replace(
        pod=target.ref,
        target=None,
        pod_refusal=None,
        node=target.node,
        moved_to=view.vm.spec.move_to if view.vm.spec.move_to == target.node else view.record.moved_to,
    )
    return Note(done, "Moved", f"the virtual machine runs on node {target.node} now (pod {target.name})")


def _let_go(view: _View) -> Step | None:
    """Drops pods that cannot run the VM any more from the record. While a target waits for a decision, only the target can."""
    record, pod, target = view.record, view.pod, view.target
    if record.target is not None and target is None:
        return Forget(record.target)
    if target is not None and target.is_over:
        without = record.replace(target=None)
        if target.deleting:  # it has failed nothing; the event of its deletion says why
            return Note(without)
        failed = refused_again(record.pod_refusal, _words(target), view.vm.generation, view.now)
        return Note(without.replace(pod_refusal=failed), "MoveFailed", _words(target), is_warning=True)
    if record.pod is None or (target is not None and target.may_run):
        return None
    if pod is None:
        return Forget(record.pod)
    if pod.is_over:
        return Note(_ended(view, pod))
    if pod.has_moved and pod.moved is not None:
        return Note(record.replace(pod=None, node=pod.moved.message or record.node, pod_refusal=None))
    return None


def _ended(view: _View, pod: PodSeen) -> Record:
    """kubelet calls a deleted pod Failed, too: a guest that is saved or shut down has an exit code."""
    has_failed = pod.phase == "Failed" and not pod.deleting and view.now - pod.created_at < _LASTED
    failures = view.record.failures + 1 if has_failed else 0
    return view.record.replace(pod=None, failures=failures, ended_at=view.now, pod_refusal=None)


def _words(pod: PodSeen) -> str:
    return pod.trouble or f"pod {pod.name} ended"


def _leftovers(view: _View) -> Step | None:
    """Pods that the record does not name: moved away, given up half-made, or made by a controller that was killed. One new pod
    stays if it may be wanted."""
    new = sorted((one for one in view.others if _is_new(one)), key=lambda one: (one.created_at, one.uid))
    kept = next((one for one in new if _fits(view, one)), None)
    for one in view.others:
        if not one.deleting and one is not kept:
            return Delete(one, "it is not the virtual machine's pod any more")
    return None


def _fits(view: _View, new: PodSeen) -> bool:
    """Whether it is the pod that would be made now."""
    if view.vm.deleting or not view.vm.spec.wants_pod:
        return False
    wanted, spec = _wanted(view), view.vm.spec
    return wanted is not None and (
        (new.restore_from, new.move_to, new.restarted_at, new.template)
        == (wanted.restore_from, wanted.move_to, spec.restarted_at, fingerprint(spec.template))
        and view.now < new.created_at + _USED_WITHIN
    )


def _removed(view: _View) -> Step | None:
    """The object is being deleted: its pods go, then what nodes keep, which their agents remove."""
    if not view.vm.deleting:
        return None
    for one in (view.target, view.pod):
        if one is not None and not one.deleting:
            return Delete(one, "the virtual machine is deleted")
    gone = tuple(sorted(name for name in view.vm.kept if named(view.nodes, name) is None))
    if view.pods or not view.vm.has_finalizer or len(gone) < len(view.vm.kept):
        return None
    return SetFinalizer(exists=False, given_up=gone)


def _stopped(view: _View) -> Step | None:
    """A pod that is not wanted, or not as it is. A move is given up first: then its guest runs on where it is."""
    pod, target, spec = view.pod, view.target, view.vm.spec
    why = ""
    if not spec.wants_pod:
        why = f"spec.state is {spec.state}"
    elif pod is not None and spec.restarted_at and spec.restarted_at != pod.restarted_at:
        why = "a restart was asked for"
    if target is not None:
        given_up = why or _no_longer_moves(view, target)
        can_be = not target.deleting and not target.has_arrived and not target.is_undecided
        if not given_up or not can_be:
            return None
        if not why and (pod is None or pod.is_over) and not target.stop_saves:
            return Delete(target, f"{given_up} before the move did; its memory is lost, and it boots", "MemoryLost")
        return Delete(target, f"the move is given up: {given_up}")
    return Delete(pod, why) if pod is not None and why and not pod.deleting else None


def _no_longer_moves(view: _View, target: PodSeen) -> str:
    """Why the target is not to wait for the VM any longer, "" if it is."""
    pod, move = view.pod, view.move
    if pod is not None and pod.has_moved:
        return ""
    if pod is None or pod.is_over:
        return "its first pod has ended" if _cannot_have_arrived(view, target) else ""
    if move is None:
        return "nobody asks for it any more"
    if pod.is_paused:  # its node refuses to move it, and a pod with a target is not resumed
        return IS_PAUSED
    return "" if move.to == target.move_to else f"it is to go to node {move.to or 'any other'} now"


def _cannot_have_arrived(view: _View, target: PodSeen) -> bool:
    """Whether its agent says so now."""
    if target.gated or not target.node:
        return True
    node = named(view.nodes, target.node)
    return target.arrived is not None and node is not None and not node.agent_is_silent(view.now)


def _started(view: _View) -> Step | None:
    record, vm = view.record, view.vm
    if record.pod is not None or record.target is not None or not vm.spec.wants_pod or vm.deleting or view.waits:
        return None
    # All of them are new: `waits` names others, and the rule for leftovers has deleted those that do not fit.
    if view.others:
        new = view.others[0]
        return Note(record.replace(pod=new.ref, restarted_at=new.restarted_at, pod_refusal=None))
    return None if view.pod_has_to_wait else _wanted(view)


def _wanted(view: _View) -> Create | None:
    """The pod to make now."""
    record, bound = view.record, view.bound_to
    if record.pod is None and record.target is None:
        rather = "" if view.vm.spec.has_volume else record.node
        asked = view.vm.spec.move_to if view.vm.spec.move_to != record.moved_to else ""
        return Create(Place(only=bound, rather="" if bound else rather), move_to=asked)
    pod, move = view.pod, view.move
    if pod is None or move is None or record.target is not None or not _moves_live(view, pod):
        return None
    return Create(Place(only=move.to, never=pod.node), restore_from=pod.node, move_to=move.to)


def _moves_live(view: _View, pod: PodSeen) -> bool:
    return not pod.deleting and pod.runs and not view.crowded and not unmovable(pod, view.nodes, view.now)


def _ungated(view: _View) -> Step | None:
    gated = (one for one in (view.pod, view.target) if one is not None and one.gated and not one.deleting)
    return next((Ungate(one) for one in gated), None)


def _moved(view: _View) -> Step | None:
    """Begins a move, or saves a VM on its state volume where it cannot move while it runs."""
    pod, move, record = view.pod, view.move, view.record
    if pod is None or pod.deleting or record.target is not None:
        return None
    asked = view.vm.spec.move_to
    if asked != record.moved_to and asked in ("", pod.node):
        return Note(record.replace(moved_to=asked))
    if move is None:
        return None
    if pod.runs and pod.has_volume and pod.stop_saves and not view.crowded:
        return Delete(pod, f"{move.why}: its state goes to its volume")
    new = next((one for one in view.others if _is_new(one)), None)
    if new is not None and _fits(view, new):
        return Note(record.replace(target=new.ref), "Moves", f"{move.why}: it moves from node {pod.node}")
    return None if view.pod_has_to_wait else _wanted(view)


def _paused(view: _View) -> Step | None:
    pod = view.pod
    if pod is None or pod.deleting or view.record.target is not None:
        return None
    wanted = view.vm.spec.state is State.PAUSED
    return AskToPause(pod, wanted) if wanted != pod.asked_to_pause else None


def _placed(view: _View) -> Step | None:
    """Notes where the VM runs, for its next pod."""
    pod, before = view.pod, view.record.node
    if pod is None or not pod.runs or pod.has_moved or pod.node in ("", before):
        return None
    now = replace(view.record, node=pod.node)
    if view.vm.spec.has_volume or pod.restore_from or named(view.nodes, before) is None:
        return Note(now)
    return Note(now, "OtherNode", f"it boots on node {pod.node}; its disk stays on node {before}", is_warning=True)


_RULES: tuple[Callable[[_View], Step | None], ...] = (
    _finalizer,
    _budget,
    _arrived,
    _let_go,
    _leftovers,
    _removed,
    _stopped,
    _started,
    _ungated,
    _placed,
    _moved,
    _paused,
)


def _again_at(view: _View) -> float | None:
    times = [view.next_try]
    if view.vm.spec.state is State.SAVED or view.awaits_word:
        times.append(view.told_at)
    if view.vm.eviction is not None:
        times.append(view.vm.eviction.until)
    times += [kept.lapses_at for kept in view.vm.kept.values()]
    refusals = (view.record.pod_refusal, view.record.budget_refusal)
    times += [one.next_try for one in refusals if one is not None]
    if view.pod is not None and (node := named(view.nodes, view.pod.node)) is not None:
        times.append(node.doubted_at)
    return min((at for at in times if at > view.now), default=None)
