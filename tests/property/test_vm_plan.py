"""The controller's plan is right in a cluster where everything may happen in between. Controllers are killed after any
write and see old states, there may be two of them, and users, kubelets and agents act meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from virtshim.cluster.evictions import answer
from virtshim.cluster.moving import MoveLimits, crowded
from virtshim.cluster.plan import Plan, plan
from virtshim.cluster.status import fingerprint
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
from virtshim.cluster.values import Drain, NodeSeen, PodSeen, Record, Said, Spec, State, VmSeen

NODES = ("n1", "n2", "n3")
# How many changes a watch brings at once.
ALL = 10_000
NEWS = st.sampled_from([0, 0, 1, 3, ALL])


@dataclass
class Pending:
    """A write whose check was made, and that is yet to be done."""

    does: Callable[[], None]


class Cluster:
    """The API server, the scheduler, kubelets and agents. Each write makes a new version of its object."""

    def __init__(self, spec: Spec) -> None:
        self.now = 1000.0
        self.versions = 0
        self.vm: VmSeen | None = VmSeen("ns", "db", "vm-uid", self.version(), spec)
        self.pods: dict[str, PodSeen] = {}
        self.places: dict[str, Place] = {}
        # Pods that have the VM for good, and those that it has left: before the agents say so.
        self.has_it: set[str] = set()
        self.lost_it: set[str] = set()
        self.cordoned: set[str] = set()
        # What makes no progress now: "", "transfer" (of moves), "room" (for targets).
        self.held = ""
        self.vms: list[VmSeen | None] = [self.vm]
        self.pod_events: list[tuple[str, PodSeen | None]] = []

    def version(self) -> str:
        self.versions += 1
        return str(self.versions)

    def nodes(self) -> list[NodeSeen]:
        return [NodeSeen(name, True, name in self.cordoned, self.now) for name in NODES]

    def put_vm(self, **changed: Any) -> None:
        assert self.vm is not None
        self.vm = dataclasses.replace(self.vm, version=self.version(), **changed)
        self.vms.append(self.vm)

    def put(self, uid: str, **changed: Any) -> None:
        self.pods[uid] = dataclasses.replace(self.pods[uid], version=self.version(), **changed)
        self.pod_events.append((uid, self.pods[uid]))

    def remove(self, uid: str) -> None:
        del self.pods[uid]
        self.pod_events.append((uid, None))

    # --- what the API server does with a controller's writes

    def carry_out(self, step: Step, seen: VmSeen, mine: Controller) -> Pending | None:  # noqa: C901
        """Returns the second half of a step that reads before it writes."""
        match step:
            case Create():
                mine.wrote(self.create(step, seen), "")
            case Note():
                self.note(seen, mine, record=step.record)
            case SetFinalizer(exists=True):
                self.note(seen, mine, has_finalizer=True)
            case SetFinalizer():
                if self.vm is not None and self.vm.version == seen.version:
                    self.vm = None
                    self.vms.append(None)
            case SetBudget():
                self.note(seen, mine, has_budget=step.exists)
            case Forget():
                if step.pod.uid not in self.pods:
                    mine.pods.pop(step.pod.uid, None)
                    slot = "target" if seen.record.target == step.pod else "pod"
                    return Pending(lambda: self.note(seen, mine, record=seen.record.replace(**{slot: None})))
            case Ungate():
                return Pending(lambda: self.patch(step.pod, mine, gated=False))
            case AskToPause():
                self.patch(step.pod, mine, asked_to_pause=step.paused)
            case Delete():
                if self.vm is not None and self.vm.version == seen.version:
                    return Pending(lambda: self.delete(step.pod, mine))
        return None

    def create(self, step: Create, seen: VmSeen) -> PodSeen:
        uid = f"pod-{self.version()}"
        self.places[uid] = step.place
        self.pods[uid] = PodSeen(
            name=f"db-{uid}",
            uid=uid,
            version=self.version(),
            owner=seen.uid,
            created_at=self.now,
            gated=True,
            restore_from=step.restore_from,
            move_to=step.move_to,
            template=fingerprint(seen.spec.template),
            restarted_at=seen.spec.restarted_at,
            stop_saves=seen.spec.stop_saves,
            has_volume=seen.spec.has_volume,
        )
        self.pod_events.append((uid, self.pods[uid]))
        return self.pods[uid]

    def note(self, seen: VmSeen, mine: Controller, **changed: Any) -> None:
        if self.vm is not None and self.vm.version == seen.version:
            begins = "record" in changed and changed["record"].target is not None and seen.record.target is None
            assert not begins or self.asks_for_a_move(self.vm), "it moves although nobody asks for that"
            self.put_vm(**changed)
            mine.vm_at = len(self.vms) - 1

    def asks_for_a_move(self, vm: VmSeen) -> bool:
        asked, pod = vm.eviction, vm.record.pod
        is_evicted = asked is not None and pod is not None and asked.pod == pod.uid and self.now < asked.until
        return is_evicted or vm.spec.move_to not in ("", vm.record.moved_to)

    def patch(self, seen: PodSeen, mine: Controller, **changed: Any) -> None:
        if seen.uid in self.pods and self.pods[seen.uid].version == seen.version:
            self.put(seen.uid, **changed)
            mine.wrote(self.pods[seen.uid], seen.version)

    def delete(self, seen: PodSeen, mine: Controller | None = None) -> None:
        if seen.uid not in self.pods and mine is not None:
            mine.pods.pop(seen.uid, None)
        if seen.uid not in self.pods or self.pods[seen.uid].version != seen.version:
            return
        if not seen.node or seen.is_over:
            self.remove(seen.uid)
        else:
            self.put(seen.uid, deleting=True)
            if mine is not None:
                mine.wrote(self.pods[seen.uid], seen.version)

    # --- what happens by itself

    def schedule(self, uid: str) -> None:
        pod, place = self.pods[uid], self.places[uid]
        fits = [
            name for name in NODES if name not in self.cordoned and name != place.never and place.only in ("", name)
        ]
        if self.held == "room" and pod.restore_from:
            return
        if not pod.gated and not pod.node and not pod.deleting and fits:
            self.put(uid, node=place.rather if place.rather in fits else fits[0])

    def source_of(self, target: PodSeen) -> PodSeen | None:
        return next(
            (
                one
                for one in self.pods.values()
                if one.uid != target.uid and one.node == target.restore_from and self.runs_vm(one) and one.runs
            ),
            None,
        )

    def kubelet(self, uid: str) -> None:
        pod = self.pods[uid]
        if not pod.node or pod.runs or pod.deleting or pod.is_over:
            return
        if pod.restore_from and uid not in self.has_it:
            if pod.arrived is None:
                self.put(uid, phase="Running", arrived=Said(False, "Moving", "half of it"))
                return
            source = self.source_of(pod) if self.held != "transfer" else None
            if source is not None:  # its commit point; both agents have yet to say so
                self.has_it.add(uid)
                self.lost_it.add(source.uid)
            return
        self.put(uid, phase="Running", runs=True, ready=True, movable=Said(True))

    def agent(self, uid: str) -> None:
        pod = self.pods[uid]
        if uid in self.has_it and not pod.has_arrived:
            self.put(uid, arrived=Said(True, "Arrived"), runs=True, ready=True, movable=Said(True))
        if uid in self.lost_it and not pod.has_moved:
            self.put(uid, moved=Said(True, "Moved", "n2"))
        if pod.asked_to_pause != (pod.paused is not None and pod.paused.is_true):
            self.put(uid, paused=Said(pod.asked_to_pause, "Requested"))

    def finish(self, uid: str) -> None:
        if self.pods[uid].deleting:
            self.remove(uid)

    def collect_garbage(self) -> None:
        """A controller that has not seen the end of its object may make a pod that has no owner."""
        for pod in list(self.pods.values()) if self.vm is None else ():
            self.delete(pod)

    def runs_vm(self, pod: PodSeen) -> bool:
        """Whether the VM may run in the pod without anything that another node would have to give."""
        gets_it = not pod.restore_from or pod.uid in self.has_it
        return pod.may_run and gets_it and pod.uid not in self.lost_it


@dataclass
class Controller:
    """What it has seen is a state of the past, never older than before, except for what it has written itself: that it sees
    at once."""

    vm_at: int = 0
    pods_at: int = 0
    pods: dict[str, PodSeen] = field(default_factory=dict)
    pending: Pending | None = None

    def watch(self, cluster: Cluster, vm_news: int, pod_news: int) -> None:
        """Takes so many changes: the watches of virtual machines and of pods are two, and each may stand still for long."""
        self.vm_at = min(len(cluster.vms) - 1, self.vm_at + vm_news)
        for uid, pod in cluster.pod_events[self.pods_at : self.pods_at + pod_news]:
            self.pods_at += 1
            if pod is None:
                self.pods.pop(uid, None)
            else:
                self.pods[uid] = pod

    def wrote(self, pod: PodSeen, before: str) -> None:
        """As `virtshim.kubeapi.watching.Collection.wrote` does."""
        found = self.pods.get(pod.uid)
        if (found.version if found is not None else "") == before:
            self.pods[pod.uid] = pod


class AnythingMayHappen(RuleBasedStateMachine):
    @initialize(drain=st.sampled_from([Drain.MOVE, *Drain]), rounds=st.integers(0, 12))
    def begin(self, drain: Drain, rounds: int) -> None:
        self.cluster = Cluster(Spec(drain=drain, template={"v": 1}))
        self.controllers = [Controller(), Controller()]
        self.all_goes_well_for_a_while(rounds, 1)

    # --- controllers

    def planned(self, who: int, vm_news: int, pod_news: int, crowded: str = "") -> tuple[VmSeen, Plan] | None:
        mine, cluster = self.controllers[who], self.cluster
        mine.watch(cluster, vm_news, pod_news)
        seen = cluster.vms[mine.vm_at]
        if seen is None:
            return None
        pods = tuple(mine.pods.values())
        found = plan(seen, pods, cluster.nodes(), cluster.now, crowded)
        self.a_step_follows_from_what_is_seen(found.step, seen, pods, crowded)
        return seen, found

    def a_step_follows_from_what_is_seen(
        self, step: Step | None, seen: VmSeen, pods: tuple[PodSeen, ...], crowded: str
    ) -> None:
        if isinstance(step, Note):
            had, has = seen.record, step.record
            if has.pod is not None and not had.names(has.pod.uid):
                all_new = all(one.gated and not one.deleting for one in pods)
                assert all_new, "a successor does not wait for its predecessor"
            assert not (crowded and has.target is not None and had.target is None), "it does not wait for the others"
        assert not (crowded and isinstance(step, Create) and step.restore_from), "it does not wait for the others"

    @rule(
        who=st.integers(0, 1),
        vm_news=NEWS,
        pod_news=NEWS,
        steps=st.integers(1, 6),
        later=st.booleans(),
        crowded=st.sampled_from(["", "", "others move"]),
    )
    def controller_does_steps(
        self, who: int, vm_news: int, pod_news: int, steps: int, later: bool, crowded: str
    ) -> None:
        for _ in range(steps):
            if (found := self.planned(who, vm_news, pod_news, crowded)) is None or found[1].step is None:
                return
            pending = self.cluster.carry_out(found[1].step, found[0], self.controllers[who])
            self.no_two_pods_may_run_the_virtual_machine()
            if pending is not None and later:
                self.controllers[who].pending = pending
                return
            if pending is not None:
                pending.does()

    @rule(who=st.integers(0, 1))
    def controller_finishes_a_step_that_it_began_long_ago(self, who: int) -> None:
        if (pending := self.controllers[who].pending) is not None:
            self.controllers[who].pending = None
            pending.does()

    @rule(who=st.integers(0, 1))
    def controller_is_killed_and_started_again(self, who: int) -> None:
        cluster = self.cluster
        self.controllers[who] = Controller(len(cluster.vms) - 1, len(cluster.pod_events), dict(cluster.pods))

    # --- the cluster

    @rule(rounds=st.integers(1, 8), controllers=st.integers(1, 2))
    def all_goes_well_for_a_while(self, rounds: int, controllers: int) -> None:
        for turn in range(rounds):
            self.round(turn % controllers)
            self.no_two_pods_may_run_the_virtual_machine()

    def round(self, who: int) -> None:
        """A controller sees all, and every part of the cluster does its work."""
        found = self.planned(who, ALL, ALL)
        pending = None
        if found is not None and found[1].step is not None:
            pending = self.cluster.carry_out(found[1].step, found[0], self.controllers[who])
        if pending is not None:
            pending.does()
        self.cluster.collect_garbage()
        for uid in sorted(self.cluster.pods):
            for what in ("schedule", "kubelet", "agent", "finish"):
                if uid in self.cluster.pods:
                    getattr(self.cluster, what)(uid)

    @rule(held=st.sampled_from(["", "transfer", "room"]))
    def moves_get_stuck_or_go_on(self, held: str) -> None:
        self.cluster.held = held

    @rule(rounds=st.integers(0, 5), held=st.sampled_from(["", "transfer", "room"]))
    def somebody_drains_the_node_of_the_virtual_machine(self, rounds: int, held: str) -> None:
        self.cluster.held = held
        vm = self.cluster.vm
        pod = self.cluster.pods.get(vm.record.pod.uid) if vm is not None and vm.record.pod is not None else None
        if pod is not None and pod.node:
            self.cluster.cordoned = {pod.node}
            self.evict(pod, vm, tuple(self.cluster.pods.values()))
            self.all_goes_well_for_a_while(rounds, 1)

    @rule(pick=st.integers(0, 5), what=st.sampled_from(["schedule", "kubelet", "agent", "finish"]))
    def a_part_of_the_cluster_does_something(self, pick: int, what: str) -> None:
        if self.cluster.pods:
            getattr(self.cluster, what)(sorted(self.cluster.pods)[pick % len(self.cluster.pods)])

    @rule(pick=st.integers(0, 5), how=st.sampled_from(["fails", "is deleted", "ends slowly", "is gone"]))
    def a_pod_ends(self, pick: int, how: str) -> None:
        if not self.cluster.pods:
            return
        uid = sorted(self.cluster.pods)[pick % len(self.cluster.pods)]
        if how == "fails" and self.cluster.pods[uid].node:
            self.cluster.put(uid, phase="Failed", runs=False, ready=False)
        elif how == "ends slowly" and self.cluster.pods[uid].node:
            self.cluster.put(uid, phase="Failed", runs=False, ready=False, deleting=True)
        elif how == "is deleted":
            self.cluster.delete(self.cluster.pods[uid])
        elif how == "is gone":
            self.cluster.remove(uid)

    @rule(seconds=st.sampled_from([1.0, 30.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.now += seconds

    # --- users

    @precondition(lambda self: self.cluster.vm is not None)
    @rule(
        changed=st.one_of(
            st.builds(lambda one: {"state": one}, st.sampled_from(State)),
            st.builds(lambda one: {"drain": one}, st.sampled_from(Drain)),
            st.builds(lambda one: {"move_to": one}, st.sampled_from(["", *NODES, "nowhere"])),
            st.builds(lambda one: {"restarted_at": f"t{one}"}, st.integers(1, 9)),
            st.builds(lambda one: {"template": {"v": one}}, st.integers(1, 3)),
            st.builds(lambda one: {"stay_on_node": one}, st.booleans()),
        )
    )
    def user_changes_the_spec(self, changed: dict[str, Any]) -> None:
        assert self.cluster.vm is not None
        self.cluster.put_vm(spec=dataclasses.replace(self.cluster.vm.spec, **changed))

    @precondition(lambda self: self.cluster.vm is not None)
    @rule(pick=st.integers(0, 5), who=st.integers(0, 1), vm_news=NEWS, pod_news=NEWS)
    def somebody_evicts_a_pod(self, pick: int, who: int, vm_news: int, pod_news: int) -> None:
        """Also one that the virtual machine has left: a late repeat."""
        cluster, mine = self.cluster, self.controllers[who]
        if not cluster.pods or cluster.vm is None:
            return
        mine.watch(cluster, vm_news, pod_news)
        pod = cluster.pods[sorted(cluster.pods)[pick % len(cluster.pods)]]
        seen = cluster.vms[mine.vm_at]
        if seen is not None:
            self.evict(pod, seen, tuple(mine.pods.values()))

    def evict(self, pod: PodSeen, seen: VmSeen, pods: tuple[PodSeen, ...]) -> None:
        """`seen`, `pods`: as the controller sees them. It reads the virtual machine again before it allows anything, and when its
        mark comes too late; it does not read pods again."""
        cluster = self.cluster
        assert cluster.vm is not None
        same = next((one for one in pods if one.uid == pod.uid), None)
        said = answer(seen, same, pods, cluster.nodes(), cluster.now)
        if said.allowed or (said.mark is not None and seen.version != cluster.vm.version):
            seen = cluster.vm
            said = answer(seen, same, pods, cluster.nodes(), cluster.now)
        target = cluster.pods.get(seen.record.target.uid) if seen.record.target else None
        source = cluster.pods.get(seen.record.pod.uid) if seen.record.pod else None
        if (
            same is not None
            and not seen.deleting
            and target is not None
            and source is not None
            and pod in (source, target)
        ):
            is_moving = source.may_run and not source.has_moved and not target.has_arrived and not target.is_over
            is_moving = is_moving and seen is cluster.vm
            assert pod.deleting or not is_moving or not said.allowed, "an eviction is allowed during a move"
        if said.mark is not None and seen.version == cluster.vm.version:
            assert seen.record.pod is not None
            assert said.mark.pod == seen.record.pod.uid, "a pod is marked that the virtual machine has left"
            cluster.put_vm(eviction=said.mark)
        if said.allowed:
            cluster.delete(pod)

    @rule(node=st.sampled_from(NODES[:2]))
    def node_is_cordoned_or_uncordoned(self, node: str) -> None:
        self.cluster.cordoned ^= {node}

    @precondition(lambda self: self.cluster.vm is not None and not self.cluster.vm.deleting)
    @rule(sure=st.sampled_from([False] * 9 + [True]))
    def user_deletes_the_virtual_machine(self, sure: bool) -> None:
        if sure and self.cluster.vm is not None and self.cluster.vm.has_finalizer:
            self.cluster.put_vm(deleting=True)

    # --- what always holds

    @invariant()
    def no_two_pods_may_run_the_virtual_machine(self) -> None:
        if hasattr(self, "cluster"):
            running = [one.name for one in self.cluster.pods.values() if self.cluster.runs_vm(one)]
            assert len(running) <= 1, running

    @invariant()
    def at_most_one_more_pod_waits_for_it(self) -> None:
        if hasattr(self, "cluster"):
            waiting = [
                one
                for one in self.cluster.pods.values()
                if one.may_run and one.restore_from and one.uid not in self.cluster.has_it and not one.deleting
            ]
            assert len(waiting) <= 1, waiting

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.settle()

    def settle(self) -> None:
        """Nothing changes from outside any more: now it converges."""
        cluster = self.cluster
        cluster.cordoned.clear()
        if cluster.vm is not None and cluster.held:  # moves go on to be stuck, and nobody asks for one any more
            cluster.put_vm(spec=dataclasses.replace(cluster.vm.spec, move_to=""))
        for mine in self.controllers:
            if mine.pending is not None:
                mine.pending.does()
                mine.pending = None
        if cluster.vm is not None and cluster.vm.spec.move_to == "nowhere":
            cluster.put_vm(spec=dataclasses.replace(cluster.vm.spec, move_to=""))
        for turn in range(120):
            before = cluster.versions
            self.round(turn % 2)
            if cluster.versions == before:
                cluster.now += 400.0
            self.no_two_pods_may_run_the_virtual_machine()
        found = self.planned(0, ALL, ALL)
        if found is None:
            assert cluster.pods == {}
            return
        assert found[1].step is None, found[1].step
        vm, alive = found[0], list(cluster.pods.values())
        if vm.deleting or not vm.spec.wants_pod:
            assert alive == []
            return
        (pod,) = alive
        assert (vm.record.pod, vm.record.target) == (pod.ref, None)
        assert (pod.runs, pod.deleting, pod.gated) == (True, False, False)
        assert pod.restarted_at == vm.spec.restarted_at or not vm.spec.restarted_at
        assert pod.asked_to_pause == (vm.spec.state is State.PAUSED)
        assert vm.spec.move_to in ("", vm.record.moved_to)


@given(nodes=st.lists(st.sampled_from(NODES), max_size=20))
def test_no_more_virtual_machines_move_at_once_than_the_limits_allow(nodes: list[str]) -> None:
    """All ask for a move, one after the other. Who waits has a reason."""
    limits, moving = MoveLimits(), list[PodSeen]()
    for number, node in enumerate(nodes):
        pod = PodSeen(f"vm{number}-1", f"pod{number}", "1", node=node)
        vm = VmSeen("ns", f"vm{number}", f"uid{number}", "1", record=Record(pod.ref, node=node))
        here = sum(one.node == node for one in moving)
        must_wait = len(moving) == limits.in_all or here == limits.from_node
        assert bool(crowded(vm, pod, moving, limits)) == must_wait
        if not must_wait:
            moving.append(pod)
    assert len(moving) <= 5
    assert all(sum(one.node == node for one in moving) <= 2 for node in NODES)


AnythingMayHappen.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnythingMayHappen = AnythingMayHappen.TestCase


# --- single stories in the same cluster, which chance tells too seldom


def begun(rounds: int = 10) -> AnythingMayHappen:
    """The first controller has made everything; the second one has seen nothing yet."""
    machine = AnythingMayHappen()
    machine.begin(Drain.MOVE, rounds)
    return machine


def ended(machine: AnythingMayHappen) -> None:
    machine.no_two_pods_may_run_the_virtual_machine()
    machine.at_most_one_more_pod_waits_for_it()
    machine.settle()


def test_a_controller_that_has_not_seen_the_pod_makes_no_second_one() -> None:
    machine = begun()
    machine.controller_does_steps(1, ALL, 0, 6, False, "")
    ended(machine)


def test_a_controller_that_has_not_seen_the_target_makes_no_second_one() -> None:
    machine = begun()
    mine = machine.controllers[1]
    mine.watch(machine.cluster, ALL, ALL)
    machine.somebody_drains_the_node_of_the_virtual_machine(5, "transfer")
    assert machine.cluster.vm is not None
    assert machine.cluster.vm.record.target is not None
    machine.controller_does_steps(1, ALL, 0, 6, False, "")
    ended(machine)


def test_a_successor_waits_for_a_pod_that_ends_slowly() -> None:
    machine = begun()
    machine.time_passes(700.0)  # so that the end counts as no failure, after which the successor would wait anyway
    machine.a_pod_ends(0, "ends slowly")
    machine.controller_does_steps(0, ALL, ALL, 6, False, "")
    assert len(machine.cluster.pods) == 1
    ended(machine)


def test_a_pod_that_has_failed_is_followed_by_another_one() -> None:
    machine = begun()
    machine.a_pod_ends(0, "fails")
    ended(machine)


def test_a_move_that_is_stuck_is_given_up_when_nobody_asks_any_more() -> None:
    for held in ("transfer", "room"):
        machine = begun()
        machine.somebody_drains_the_node_of_the_virtual_machine(5, held)
        ended(machine)
