"""Carries out the plans of VirtualMachines, one step after the other.

The controller has no state that the API server does not have. So it may be killed at any moment, and two controllers do no harm.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from virtshim.cluster import writing
from virtshim.cluster.api import BUDGETS, PODS, VMS, Api, ConflictFound, Document, GoneFound, Notices, below
from virtshim.cluster.evictions import ALLOWED, Answer, answer
from virtshim.cluster.moving import MoveLimits, crowded
from virtshim.cluster.plan import Plan, plan
from virtshim.cluster.reading import part, parts, text, words
from virtshim.cluster.seeing import Cluster
from virtshim.cluster.steps import AskToPause, Create, Delete, Forget, Note, SetBudget, SetFinalizer, Step, Ungate
from virtshim.cluster.turns import Key, Turns
from virtshim.cluster.values import FINALIZER, VM_LABEL, PodSeen, VmSeen, budget_name, refused_again, seen_pod
from virtshim.kubeapi.kubeconfig import Access
from virtshim.model.errors import InvalidRequest, PermissionRefused, ShimError, Unavailable
from virtshim.system.clock import Clock
from virtshim.system.locks import new_lock
from virtshim.system.rate_limits import TroubleLog
from virtshim.system.threads import lasting

log = structlog.get_logger(__name__)

_WORKERS: Final = 4
# Seconds until a VM is looked at again after an error.
_AGAIN: Final = 5.0
# Tries to write the mark of an eviction: agents and the controller write to the object meanwhile.
_MARKS: Final = 4


@dataclass(slots=True)
class Controller:
    access: Callable[[], Access]
    clock: Clock
    namespace: str
    limits: MoveLimits = MoveLimits()
    api: Api = field(init=False)
    cluster: Cluster = field(init=False)
    _turns: Turns = field(init=False)
    _notices: Notices = field(init=False)
    _failures: TroubleLog = field(init=False)
    _threads: list[threading.Thread] = field(default_factory=list)
    _moves_begin: threading.Lock = field(default_factory=new_lock)
    # VMs whose move waits for the end of another one.
    _crowded_out: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.api = Api(self.access)
        self._turns = Turns(self.clock)
        self._notices = Notices(self.api, self.clock, "virtshim-controller")
        self._failures = TroubleLog(log, over="vm.works_again")
        self.cluster = Cluster(self.access, self.clock, self.namespace, self._turns.touch)

    def start(self) -> None:
        """Returns when everything has been read once. Raises Unavailable."""
        for one in self.cluster.collections:
            one.start_and_list()
        self._threads = [lasting(self._work, f"vms-{number}") for number in range(_WORKERS)]

    def close(self) -> None:
        self._turns.close()
        for one in self.cluster.collections:
            one.close()
        for thread in self._threads:
            thread.join(_AGAIN)

    # --- evictions

    def evicted(self, namespace: str, name: str, *, dry_run: bool) -> Answer:
        """What the webhook answers. Raises ShimError if the mark cannot be written."""
        document = self.cluster.pods.get(namespace, name)
        label = document and text(document["metadata"].get("labels") or {}, VM_LABEL)
        if not document or not label:
            return ALLOWED
        known, is_fresh = self.cluster.vms.get(namespace, label), False
        for _ in range(_MARKS):
            if known is None:
                return ALLOWED
            vm = self.cluster.seen(known)
            found = self._answer(vm, name)
            if found.allowed and not is_fresh:  # what is seen may be older than a move
                known, is_fresh = self._fresh(namespace, label), True
                continue
            if found.mark is None or dry_run:
                return found
            path = below(VMS, namespace, label, "status")
            change = {"metadata": {"resourceVersion": vm.version}, "status": {"eviction": writing.eviction(found.mark)}}
            try:
                written = self.api.change(path, change)
            except GoneFound:
                return ALLOWED
            except ConflictFound:
                known, is_fresh = self._fresh(namespace, label), True
                continue
            self.cluster.vms.wrote(written, vm.version)
            self._turns.touch((namespace, label))
            log.info("vm.eviction", vm=f"{namespace}/{label}", pod=name, answer=found.message)
            return found
        raise Unavailable(f"the object of virtual machine {label} changes too often; ask again")

    def _answer(self, vm: VmSeen, name: str) -> Answer:
        pods, nodes = self.cluster.pods_of(vm), self.cluster.nodes_seen()
        pod = next((one for one in pods if one.name == name), None)
        return answer(vm, pod, pods, nodes, self._now(), self._crowded(vm, pods))

    # --- plans

    def _work(self) -> None:
        while (key := self._turns.take()) is not None:
            try:
                self.settle(key)
            except (ConflictFound, GoneFound) as exc:  # somebody else was faster; the watch brings the news
                log.debug("vm.changed_meanwhile", vm="/".join(key), why=str(exc))
                self._turns.touch_at(key, self._now() + _AGAIN)
            except ShimError as exc:
                self._failures.met("vm.step_failed", key=key, vm="/".join(key), error=str(exc))
                self._turns.touch_at(key, self._now() + _AGAIN)
            except Exception:  # the other VMs continue
                log.exception("vm.broken", vm="/".join(key))
                self._turns.touch_at(key, self._now() + _AGAIN)
            finally:
                self._turns.done(key)

    def settle(self, key: Key) -> None:
        """Does one step about a VM, and asks for another turn if there may be more."""
        document = self.cluster.vms.get(*key)
        if document is None:
            return
        vm = self.cluster.seen(document)
        pods, nodes = self.cluster.pods_of(vm), self.cluster.nodes_seen()
        now = self._now()
        wait = self._crowded(vm, pods)
        planned = plan(vm, pods, nodes, now, wait)
        document = self._show(vm, document, planned, now)
        vm = self.cluster.seen(document)
        if planned.step is not None:
            self._do_alone(planned.step, vm, document, pods)
            self._turns.touch(key)
            if vm.record.target is not None:  # the step may have ended a move
                self._let_others_move()
        elif planned.again_at is not None:
            self._turns.touch_at(key, planned.again_at)
        if wait and (vm.eviction is not None or vm.spec.move_to):
            self._crowded_out.add(key)
            self._turns.touch_at(key, now + _AGAIN)
        self._failures.over(key=key)

    def _let_others_move(self) -> None:
        while self._crowded_out:
            with contextlib.suppress(KeyError):  # another worker was faster
                self._turns.touch(self._crowded_out.pop())

    def _do_alone(self, step: Step, vm: VmSeen, document: Document, pods: list[PodSeen]) -> None:
        """Moves begin one after the other, so that they count each other."""
        if not isinstance(step, Note) or step.record.target is None or vm.record.target is not None:
            self._do(step, vm, document)
            return
        with self._moves_begin:
            if not self._crowded(vm, pods):
                self._do(step, vm, document)

    def _now(self) -> float:
        return self.clock.now_ns() / 1e9

    def _crowded(self, vm: VmSeen, pods: list[PodSeen]) -> str:
        return crowded(vm, seen_pod(vm.record.pod, pods), self.cluster.moving(vm), self.limits)

    def _show(self, vm: VmSeen, document: Document, planned: Plan, now: float) -> Document:
        """Writes the status for people. Returns the object as it is then."""
        change = writing.status_change(vm, document, planned.shown, now)
        if not change:
            return document
        written = self._change_status(vm, change)
        before = {text(one, "type"): one for one in parts(vm.shown, "conditions")}
        for one in planned.shown.conditions:
            had = before.get(one.type, {})
            is_news = (text(had, "reason"), text(had, "message")) != (one.reason, one.message)
            if is_news and one.reason in _TOLD:
                self._notices.tell(document, one.reason, one.message, is_warning=one.reason in _WARNINGS)
        return written

    def _change_status(self, vm: VmSeen, change: dict[str, Any]) -> Document:
        path = below(VMS, vm.namespace, vm.name, "status")
        written = self.api.change(path, {"metadata": {"resourceVersion": vm.version}, "status": change})
        self.cluster.vms.wrote(written, vm.version)
        return written

    # --- steps

    def _do(self, step: Step, vm: VmSeen, document: Document) -> None:
        log.info("vm.step", vm=f"{vm.namespace}/{vm.name}", step=type(step).__name__, of=_subject(step))
        match step:
            case Create():
                self._create(step, vm, document)
            case Note():
                self._change_status(vm, {"record": writing.record(step.record)})
                if step.reason:
                    self._notices.tell(document, step.reason, step.message, is_warning=step.is_warning)
            case Forget():
                self._forget(step, vm, document)
            case Ungate():
                found = self.cluster.pods.get(vm.namespace, step.pod.name) or {}
                self._change_pod(vm, step.pod, writing.ungated(step.pod, found))
            case AskToPause():
                self._change_pod(vm, step.pod, writing.pause_asked(step.pod, paused=step.paused))
            case Delete():
                self._delete(step, vm, document)
            case SetBudget():
                self._set_budget(vm, document, exists=step.exists)
            case SetFinalizer():
                self._set_finalizer(step, vm, document)

    def _create(self, step: Create, vm: VmSeen, document: Document) -> None:
        try:
            made = self.api.create(below(PODS, vm.namespace), writing.pod(vm, step))
        except (InvalidRequest, PermissionRefused) as exc:
            # Quotas, PodSecurity and the like answer as missing rights do.
            refusal = refused_again(vm.record.pod_refusal, str(exc), vm.generation, self._now())
            self._change_status(vm, {"record": writing.record(vm.record.replace(pod_refusal=refusal))})
            self._notices.tell(document, "PodRefused", f"spec.template: {exc}", is_warning=True)
            return
        self.cluster.pods.wrote(made, "")

    def _forget(self, step: Forget, vm: VmSeen, document: Document) -> None:
        """The API server itself is asked, as the watch of pods may be behind the one of VMs."""
        path = below(PODS, vm.namespace, step.pod.name)
        try:
            found = self.api.get(path)
        except GoneFound:
            found = {}
        if found and text(found["metadata"], "uid") == step.pod.uid:
            if text(part(found["metadata"], "labels"), VM_LABEL) == vm.name:
                raise ConflictFound(f"pod {step.pod.name} is there")
            change = {"metadata": {"uid": step.pod.uid, "labels": {VM_LABEL: vm.name}}}
            self.cluster.pods.wrote(self.api.change(path, change), "")
            message = f"somebody changed the label {VM_LABEL} of pod {step.pod.name}; the controller has restored it"
            self._notices.tell(document, "PodLabelled", message, is_warning=True)
            return
        self.cluster.pods.found_gone(vm.namespace, step.pod.name, step.pod.uid)
        is_target = vm.record.target == step.pod
        ended = vm.record.replace(pod=None, failures=0, ended_at=self._now(), pod_refusal=None)
        record = vm.record.replace(target=None) if is_target else ended
        self._change_status(vm, {"record": writing.record(record)})

    def _change_pod(self, vm: VmSeen, pod: PodSeen, change: dict[str, Any]) -> None:
        try:
            written = self.api.change(below(PODS, vm.namespace, pod.name), change)
        except GoneFound:
            self.cluster.pods.found_gone(vm.namespace, pod.name, pod.uid)
            raise
        self.cluster.pods.wrote(written, pod.version)

    def _delete(self, step: Delete, vm: VmSeen, document: Document) -> None:
        """Only if the VM is as it was when this was decided: a record that is read late may not name its own pod."""
        fresh = self._fresh(vm.namespace, vm.name)
        if fresh is None or text(fresh["metadata"], "resourceVersion") != vm.version:
            raise ConflictFound("the virtual machine has changed")
        try:
            ending = self.api.remove(below(PODS, vm.namespace, step.pod.name), writing.deletion(step.pod))
        except GoneFound:
            self.cluster.pods.found_gone(vm.namespace, step.pod.name, step.pod.uid)
            return
        if ending.get("kind") == "Pod":
            self.cluster.pods.wrote(ending, step.pod.version)
        reason, message = step.warning or "PodDeleted", f"pod {step.pod.name}: {step.why}"
        self._notices.tell(document, reason, message, is_warning=bool(step.warning))

    def _set_budget(self, vm: VmSeen, document: Document, *, exists: bool) -> None:
        name = budget_name(vm.name)
        if exists:
            try:
                self.cluster.budgets.wrote(self.api.create(below(BUDGETS, vm.namespace), writing.budget(vm)), "")
                return
            except ConflictFound:
                why = f"PodDisruptionBudget {name} is not this virtual machine's; remove or rename it"
            except (InvalidRequest, PermissionRefused) as exc:
                why = f"PodDisruptionBudget {name} is refused: {exc}"
            refusal = refused_again(vm.record.budget_refusal, why, vm.generation, self._now())
            self._change_status(vm, {"record": writing.record(vm.record.replace(budget_refusal=refusal))})
            if refusal.tries > 1:
                self._notices.tell(document, "BudgetRefused", why, is_warning=True)
            return
        found = self.cluster.budgets.get(vm.namespace, name)
        if found is not None:
            uid = text(found["metadata"], "uid")
            self.api.remove(below(BUDGETS, vm.namespace, name), {"preconditions": {"uid": uid}})
            self.cluster.budgets.found_gone(vm.namespace, name, uid)

    def _set_finalizer(self, step: SetFinalizer, vm: VmSeen, document: Document) -> None:
        others = [one for one in words(document["metadata"], "finalizers") if one != FINALIZER]
        wanted = [*others, FINALIZER] if step.exists else others
        change = {"metadata": {"resourceVersion": vm.version, "finalizers": wanted}}
        written = self.api.change(below(VMS, vm.namespace, vm.name), change)
        if step.exists:
            self.cluster.vms.wrote(written, vm.version)
        for node in step.given_up:
            message = f"node {node} is gone from the cluster; what it keeps of the virtual machine stays on its disk"
            self._notices.tell(document, "NodeGone", message, is_warning=True)

    def _fresh(self, namespace: str, name: str) -> Document | None:
        try:
            return self.api.get(below(VMS, namespace, name))
        except GoneFound:
            return None


# Conditions' reasons that become events when they are news.
_WARNINGS: Final = (
    "CannotMove",
    "Unschedulable",
    "NoSuchNode",
    "NotSaved",
    "StopDoesNotSave",
    "AgentSilent",
    "NodeSilent",
)
_TOLD: Final = (*_WARNINGS, "Stopping", "Waits")


def _subject(step: Step) -> str:
    match step:
        case Forget() | Ungate() | Delete() | AskToPause():
            return step.pod.name
        case Create():
            return f"from {step.restore_from}" if step.restore_from else ""
        case Note():
            return step.reason
        case SetBudget() | SetFinalizer():
            return str(step.exists)
