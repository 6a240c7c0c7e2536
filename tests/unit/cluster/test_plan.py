"""The controller's next step is right in single situations. tests/property/test_vm_plan.py lets everything happen at
once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from virtshim.cluster.evictions import Answer, answer
from virtshim.cluster.moving import MoveLimits, crowded
from virtshim.cluster.plan import Plan, plan
from virtshim.cluster.status import fingerprint
from virtshim.cluster.steps import AskToPause, Create, Delete, Forget, Note, Place, SetBudget, SetFinalizer, Ungate
from virtshim.cluster.values import (
    Drain,
    Eviction,
    Kept,
    NodeSeen,
    PodRef,
    PodSeen,
    Record,
    Refusal,
    Said,
    Spec,
    State,
    VmSeen,
    refused_again,
)

NOW = 10_000.0
TEMPLATE: dict[str, Any] = {"spec": {"containers": []}}
ON_VOLUME = {"metadata": {"annotations": {"virtshim.io/state-volume": "/state"}}}


def node(name: str, **changes: Any) -> NodeSeen:
    return NodeSeen(name, **{"agent_at": NOW - 1, **changes})


NODES = (node("n1"), node("n2"))


def pod(name: str = "db-1", **changes: Any) -> PodSeen:
    usual = {"node": "n1", "phase": "Running", "runs": True, "ready": True, "movable": Said(True)}
    usual |= {"created_at": NOW - 5000, "template": fingerprint(TEMPLATE)}
    return PodSeen(name, f"uid-{name}", "1", owner="vm", **{**usual, **changes})


def new(name: str = "db-2", **changes: Any) -> PodSeen:
    usual = {"node": "", "phase": "Pending", "runs": False, "ready": False, "movable": None, "gated": True}
    return pod(name, **{**usual, "created_at": NOW - 1, **changes})


def target(**changes: Any) -> PodSeen:
    usual = {
        "node": "n2",
        "runs": False,
        "ready": False,
        "restore_from": "n1",
        "arrived": Said(False, "Moving", "half of it"),
    }
    return pod("db-2", **{**usual, "movable": None, **changes})


def vm(pods: tuple[PodSeen | None, PodSeen | None] = (None, None), **changes: Any) -> VmSeen:
    """`pods`: the one that the record names, and the target."""
    record = Record(*(one.ref if one else None for one in pods), node="n1")
    usual = {"spec": Spec(template=TEMPLATE), "record": record, "has_finalizer": True, "has_budget": True}
    return VmSeen("shop", "db", "vm", "5", **{**usual, **changes})


def drained(one: PodSeen, *, at: float = NOW - 3, cordoned: bool = True) -> Eviction:
    return Eviction(one.uid, at, cordoned)


CORDONED = (node("n1", cordoned=True), node("n2"))


def planned(seen: VmSeen, *pods: PodSeen, nodes: tuple[NodeSeen, ...] = NODES, **more: Any) -> Plan:
    return plan(seen, pods, nodes, NOW, **more)


def step(seen: VmSeen, *pods: PodSeen, **more: Any) -> Any:
    return planned(seen, *pods, **more).step


def condition(found: Plan, kind: str) -> tuple[str, str]:
    (one,) = [one for one in found.shown.conditions if one.type == kind]
    return one.status, one.reason


# --- starting and stopping


def test_a_virtual_machine_without_a_pod_gets_one_that_waits_to_be_recorded() -> None:
    assert step(vm(record=Record())) == Create()


def test_the_record_names_the_new_pod_before_it_is_scheduled() -> None:
    assert step(vm(), new()).record.pod == new().ref
    assert step(vm((new(), None)), new()) == Ungate(new())


REFUSED = Refusal("exceeded quota", generation=3, tries=2, at=NOW - 1)


def test_a_refused_pod_is_tried_again_later_or_when_the_spec_has_changed() -> None:
    record = Record(node="n1", pod_refusal=REFUSED)
    found = planned(vm(record=record, generation=3))
    assert (found.step, found.again_at, condition(found, "Ready")) == (None, NOW + 9, ("False", "PodRefused"))
    assert isinstance(step(vm(record=record, generation=4)), Create)
    late = Record(node="n1", pod_refusal=dataclasses.replace(REFUSED, at=NOW - 10))
    assert isinstance(step(vm(record=late, generation=3)), Create)
    assert condition(planned(vm(record=late, generation=3)), "Ready") == ("False", "PodRefused")
    assert step(vm(record=record, generation=3), new()).record.pod_refusal is None


def test_a_move_whose_second_pod_is_refused_waits_and_says_so() -> None:
    there = pod()
    record = Record(there.ref, node="n1", pod_refusal=REFUSED)
    seen = vm(record=record, generation=3, eviction=drained(there))
    found = planned(seen, there, nodes=CORDONED)
    assert (found.step, condition(found, "Draining")) == (None, ("True", "TriesAgain"))
    assert "exceeded quota" in answer(seen, there, [there], CORDONED, NOW).message


def test_tries_of_what_is_refused_get_rarer_up_to_five_minutes() -> None:
    waits, refusal = [], None
    for _ in range(9):
        refusal = refused_again(refusal, "no", 1, NOW)
        waits.append(refusal.next_try - NOW)
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert refused_again(refusal, "no", 2, NOW).tries == 1


def test_a_virtual_machine_goes_on_without_the_budget_whose_name_is_taken_and_says_so() -> None:
    record = Record(node="n1", budget_refusal=REFUSED)
    found = planned(vm(record=record, generation=3, has_budget=False))
    assert (found.step, condition(found, "Protected")) == (Create(Place(rather="n1")), ("False", "BudgetRefused"))
    assert step(vm(record=record, generation=3)).record.budget_refusal is None
    first = Record(node="n1", budget_refusal=dataclasses.replace(REFUSED, tries=1))
    found = planned(vm(record=first, generation=3, has_budget=False))
    assert condition(found, "Protected") == ("False", "NoBudget")  # another controller may just have made it


def test_a_pod_of_somebody_else_is_never_touched() -> None:
    other = pod("other", gated=False)
    assert isinstance(step(vm(record=Record()), dataclasses.replace(other, owner="somebody")), Create)


def test_a_pod_that_the_record_does_not_name_is_never_adopted_once_it_was_scheduled() -> None:
    young = pod("db-2", created_at=NOW - 1)
    assert isinstance(step(vm(), young), Delete)
    assert step(vm(), new(deleting=True)) is None


def test_two_controllers_made_a_pod_each_and_one_of_them_goes() -> None:
    one, two = new("db-2"), new("db-3", created_at=NOW)
    assert step(vm(), one, two) == Delete(two, "it is not the virtual machine's pod any more")


def test_an_object_gets_its_finalizer_and_its_budget_first() -> None:
    assert step(vm(has_finalizer=False, has_budget=False)) == SetFinalizer(exists=True)
    assert step(vm(has_budget=False)) == SetBudget(exists=True)
    assert step(vm(spec=Spec(drain=Drain.RESTART, template=TEMPLATE))) == SetBudget(exists=False)


@pytest.mark.parametrize(
    "seen",
    [vm(deleting=True, has_budget=False), vm(spec=Spec(state=State.STOPPED, template=TEMPLATE))],
    ids=["deleted", "stopped"],
)
def test_a_new_pod_that_nobody_wants_any_more_goes(seen: VmSeen) -> None:
    assert isinstance(step(seen, new()), Delete)


def test_a_pause_is_asked_for_and_taken_back() -> None:
    paused = vm((pod(), None), spec=Spec(state=State.PAUSED, template=TEMPLATE))
    assert step(paused, pod()) == AskToPause(pod(), paused=True)
    assert step(paused, pod(asked_to_pause=True)) is None
    assert step(vm((pod(), None)), pod(asked_to_pause=True)) == AskToPause(pod(asked_to_pause=True), paused=False)


def test_a_pod_that_was_made_from_an_older_template_is_made_again() -> None:
    old = new(template="other")
    assert isinstance(step(vm(), old), Delete)


def test_a_recorded_pod_that_is_not_seen_is_looked_for_before_it_is_let_go() -> None:
    assert step(vm((pod(), None))) == Forget(PodRef("db-1", "uid-db-1"))


def test_a_successor_waits_until_the_pod_is_gone() -> None:
    ending = pod("old", deleting=True)
    found = planned(vm(), ending)
    assert (found.step, condition(found, "Ready")) == (None, ("False", "Waits"))


@pytest.mark.parametrize("state", [State.STOPPED, State.SAVED])
def test_a_stop_deletes_the_pod(state: State) -> None:
    assert isinstance(step(vm((pod(), None), spec=Spec(state=state, template=TEMPLATE)), pod()), Delete)


def test_each_new_time_of_a_restart_ends_the_pod_once() -> None:
    spec = Spec(restarted_at="t1", template=TEMPLATE)
    assert isinstance(step(vm((pod(), None), spec=spec), pod()), Delete)
    assert (
        step(
            vm((pod(), None), spec=spec, record=Record(pod().ref, node="n1", restarted_at="t1")), pod(restarted_at="t1")
        )
        is None
    )


def test_a_changed_template_waits_and_the_status_says_so() -> None:
    found = planned(vm((pod(), None), spec=Spec(template={"other": 1})), pod())
    assert (found.step, found.shown.waits_for_restart) == (None, True)


def test_pods_that_fail_at_once_are_made_ever_later() -> None:
    record = Record(node="n1", failures=3, ended_at=NOW - 1)
    found = planned(vm(record=record))
    assert (found.step, found.again_at) == (None, NOW - 1 + 40.0)
    assert isinstance(step(vm(record=dataclasses.replace(record, ended_at=NOW - 41))), Create)


def test_a_pod_that_ended_is_let_go_and_counted_if_it_failed_soon() -> None:
    soon, late = pod(phase="Failed", created_at=NOW - 5), pod(phase="Failed")
    assert step(vm((soon, None)), soon).record == Record(node="n1", failures=1, ended_at=NOW)
    assert step(vm((late, None)), late).record.failures == 0


def test_a_pod_that_was_deleted_has_not_failed() -> None:
    """kubelet calls it Failed: a guest that is saved or shut down has an exit code."""
    ended = pod(phase="Failed", created_at=NOW - 5, deleting=True, has_volume=True, stop_saves=True)
    seen = vm((ended, None), spec=Spec(template=ON_VOLUME))
    assert step(seen, ended).record.failures == 0


def test_a_deleted_object_is_kept_until_nodes_have_removed_what_they_keep() -> None:
    kept = {"n1": Kept(), "gone": Kept()}
    assert isinstance(step(vm((pod(), None), deleting=True, has_budget=False), pod()), Delete)
    ending = pod(deleting=True)
    assert step(vm((ending, None), deleting=True, has_budget=False), ending) is None
    assert step(vm(deleting=True, kept=kept, has_budget=False)) is None
    assert step(vm(deleting=True, kept={"gone": Kept()}, has_budget=False)) == SetFinalizer(
        exists=False, given_up=("gone",)
    )


# --- placement


def test_the_next_pod_rather_goes_where_the_disk_is() -> None:
    assert step(vm()) == Create(Place(rather="n1"))
    assert step(vm(spec=Spec(template=ON_VOLUME))) == Create()


def test_stay_on_node_binds_the_next_pod() -> None:
    assert step(vm(spec=Spec(stay_on_node=True, template=TEMPLATE))) == Create(Place(only="n1"))


def test_a_saved_memory_binds_the_next_pod_until_it_lapses() -> None:
    kept = {"n2": Kept(NOW - 50, 7, NOW + 50)}
    found = planned(vm(kept=kept))
    assert (found.step, found.again_at) == (Create(Place(only="n2")), NOW + 50)
    assert step(vm(kept={"n2": Kept(NOW - 50, 7, NOW - 1)})) == Create(Place(rather="n1"))


def test_a_restart_gives_up_the_saved_memory_of_a_node_that_is_gone() -> None:
    restarted = vm(kept={"n2": Kept(NOW - 50, 7, NOW + 50)}, spec=Spec(restarted_at="t2", template=TEMPLATE))
    assert step(restarted) == Create(Place(only="n2"))
    assert step(restarted, nodes=(node("n1"),)) == Create(Place(rather="n1"))


def test_the_next_pod_waits_until_the_agent_can_have_said_that_the_last_one_was_saved() -> None:
    spec = Spec(template={**TEMPLATE, "metadata": {"annotations": {"virtshim.io/on-stop": "save"}}})
    ended = planned(vm(spec=spec, record=Record(node="n1", ended_at=NOW - 2)))
    assert (ended.step, ended.again_at) == (None, NOW + 8)
    assert "has not said yet" in ended.shown.conditions[0].message
    saved = {"n1": Kept(NOW - 2, 7, NOW + 50)}
    assert step(vm(spec=spec, kept=saved, record=Record(node="n1", ended_at=NOW - 2))) == Create(Place(only="n1"))
    assert step(vm(spec=spec, record=Record(node="n1", ended_at=NOW - 11))) == Create(Place(rather="n1"))


def test_why_a_container_of_a_target_does_not_run_comes_before_what_its_agent_has_said_earlier() -> None:
    def shown(**changes: Any) -> str:
        there = target(**changes)
        return planned(vm((pod(), there)), pod(), there).shown.progress

    assert shown(trouble="back-off") == "it moves to node n2: back-off"
    assert shown(trouble="ContainerCreating").endswith("ContainerCreating; see kubectl describe pod db-2")
    undecided = Said(False, "Undecided", "nobody knows")
    assert shown(trouble="back-off", arrived=undecided) == "it moves to node n2: nobody knows"


def test_a_virtual_machine_that_boots_on_another_node_says_where_its_disk_is() -> None:
    found = step(vm((pod(node="n2"), None)), pod(node="n2"))
    assert (found.record.node, found.reason, found.is_warning) == ("n2", "OtherNode", True)
    assert found.message == "it boots on node n2; its disk stays on node n1"
    on_volume = vm((pod(node="n2"), None), spec=Spec(template=ON_VOLUME))
    assert step(on_volume, pod(node="n2")).reason == ""


def test_the_newest_of_two_saved_memories_counts() -> None:
    kept = {"n2": Kept(NOW - 10, 7, NOW + 50), "n1": Kept(NOW - 50, 7, NOW + 50)}
    assert step(vm(kept=kept)) == Create(Place(only="n2"))


def test_a_stopped_virtual_machine_starts_where_it_was_asked_to_move() -> None:
    assert step(vm(spec=Spec(move_to="n2", template=TEMPLATE))) == Create(Place(only="n2"), move_to="n2")


def test_a_node_that_is_gone_leaves_it_pending_until_the_user_clears_it() -> None:
    bound = Spec(stay_on_node=True, template=TEMPLATE)
    found = planned(vm(spec=bound), nodes=(node("n2"),))
    assert (found.step, found.shown.phase) == (None, "Pending")
    assert "clear spec.stayOnNode" in found.shown.conditions[0].message
    assert isinstance(step(vm(), nodes=(node("n2"),)), Create)


# --- moves


def test_a_drained_virtual_machine_gets_a_target_on_another_node() -> None:
    seen = vm((pod(), None), eviction=drained(pod()))
    assert step(seen, pod(), nodes=CORDONED) == Create(Place(never="n1"), restore_from="n1")


def test_the_target_is_recorded_and_then_scheduled() -> None:
    seen = vm((pod(), None), eviction=drained(pod()))
    waiting = new(restore_from="n1")
    noted = step(seen, pod(), waiting, nodes=CORDONED)
    assert (noted.record.target, noted.reason) == (waiting.ref, "Moves")
    moving = vm((pod(), waiting), eviction=drained(pod()))
    assert step(moving, pod(), waiting, nodes=CORDONED) == Ungate(waiting)


def test_the_first_pod_goes_when_the_virtual_machine_has_arrived() -> None:
    there = target(arrived=Said(True))
    noted = step(vm((pod(), there), eviction=drained(pod())), pod(), there)
    assert (noted.record.pod, noted.record.target, noted.record.node) == (there.ref, None, "n2")
    assert step(vm((there, None)), there, pod()) == Delete(pod(), "it is not the virtual machine's pod any more")


@pytest.mark.parametrize(
    ("eviction", "nodes"),
    [(drained(pod(), at=NOW - 61), CORDONED), (drained(pod()), NODES), (None, NODES)],
    ids=["nobody has asked for 60 s", "uncordoned", "never asked"],
)
def test_a_cancelled_drain_gives_the_move_up(eviction: Eviction | None, nodes: tuple[NodeSeen, ...]) -> None:
    found = step(vm((pod(), target()), eviction=eviction), pod(), target(), nodes=nodes)
    assert found == Delete(target(), "the move is given up: nobody asks for it any more")


def test_a_late_repeat_for_the_pod_that_it_has_left_does_not_move_it_again() -> None:
    there = target(arrived=Said(True), runs=True, movable=Said(True))
    left = drained(pod(), cordoned=False)
    assert step(vm((there, None), eviction=left), there) == Note(vm((there, None)).record.replace(node="n2"))
    assert step(vm(record=Record(there.ref, node="n2"), eviction=left), there) is None


def test_a_move_past_its_commit_point_is_not_given_up() -> None:
    for first, second in (
        (pod(moved=Said(True, message="n2")), target()),
        (pod(), target(arrived=Said(False, "Undecided"))),
    ):
        assert step(vm((first, second)), first, second) is None


def test_no_room_shows_the_schedulers_words_and_leaves_the_first_pod() -> None:
    full = target(node="", phase="Pending", arrived=None, unplaced="0/2 nodes are available: Insufficient memory")
    found = planned(vm((pod(), full), eviction=drained(pod())), pod(), full, nodes=CORDONED)
    assert (found.step, condition(found, "Draining")) == (None, ("True", "Unschedulable"))
    assert "Insufficient memory" in found.shown.progress


def test_a_target_whose_first_pod_has_ended_gets_nothing_any_more() -> None:
    told = "its first pod has ended before the move did; its memory is lost, and it boots"
    assert step(vm((pod(), target())), target()) == Delete(target(), told, "MemoryLost")
    saving = target(stop_saves=True)
    assert step(vm((pod(), saving)), saving) == Delete(saving, "the move is given up: its first pod has ended")


@pytest.mark.parametrize(
    ("waiting", "nodes"),
    [(target(arrived=Said(False, "Undecided")), NODES), (target(), (node("n1"), node("n2", agent_at=0.0)))],
    ids=["only the first node knows", "its agent is silent"],
)
def test_a_target_that_may_have_everything_is_never_ended(waiting: PodSeen, nodes: tuple[NodeSeen, ...]) -> None:
    assert step(vm((pod(), waiting)), waiting, nodes=nodes) is None


def test_a_virtual_machine_with_a_state_volume_is_saved_instead() -> None:
    first = pod(has_volume=True, stop_saves=True)
    seen = vm((first, None), eviction=drained(first), spec=Spec(template=ON_VOLUME))
    assert step(seen, first, nodes=CORDONED) == Delete(first, "node n1 is drained: its state goes to its volume")


@pytest.mark.parametrize(
    ("first", "crowded"),
    [
        (pod(has_volume=True, stop_saves=True), "others move"),
        (pod(has_volume=True, stop_saves=True, runs=False), ""),
        (pod(has_volume=True), ""),
        (pod(runs=False), ""),
        (pod(), "others move"),
    ],
    ids=["others are saved", "it starts, and is saved then", "its stop does not save", "it starts", "others move"],
)
def test_a_drained_virtual_machine_stays_until_it_can_go(first: PodSeen, crowded: str) -> None:
    seen = vm((first, None), eviction=drained(first))
    assert step(seen, first, nodes=CORDONED, crowded=crowded) is None


def test_nothing_moves_that_nobody_may_move() -> None:
    evicted_once = drained(pod())
    for spec in (
        Spec(drain=Drain.BLOCK, template=TEMPLATE),
        Spec(move_to="nowhere", template=TEMPLATE),
        Spec(move_to="n1", template=TEMPLATE),
    ):
        eviction = evicted_once if spec.drain is Drain.BLOCK else None
        found = step(vm((pod(), None), spec=spec, eviction=eviction), pod(), nodes=CORDONED)
        assert not isinstance(found, Create)
    silent = (node("n1", cordoned=True, agent_at=0.0), node("n2"))
    found = planned(vm((pod(), None), eviction=evicted_once), pod(), nodes=silent)
    assert (found.step, condition(found, "Draining")) == (None, ("False", "CannotMove"))


def test_a_request_that_is_withdrawn_can_be_made_again() -> None:
    done = Record(pod().ref, node="n1", moved_to="n2")
    assert step(vm(record=done), pod()) == Note(Record(pod().ref, node="n1"))


def test_a_recorded_target_that_is_not_seen_is_looked_for_before_it_is_let_go() -> None:
    assert step(vm((pod(), target())), pod()) == Forget(target().ref)


@pytest.mark.parametrize("first", [(), (pod(phase="Failed"),)], ids=["gone", "over"])
@pytest.mark.parametrize(
    ("waiting", "nodes"),
    [
        (target(arrived=Said(False, "Undecided")), NODES),
        (target(arrived=None), NODES),
        (target(), (node("n1"), node("n2", agent_at=0.0))),
        (target(), (node("n1"),)),
    ],
    ids=["only the first node knows", "its agent has said nothing", "its agent is silent", "its node is gone"],
)
def test_no_pod_is_made_or_ended_while_the_target_may_have_everything(
    first: tuple[PodSeen, ...], waiting: PodSeen, nodes: tuple[NodeSeen, ...]
) -> None:
    assert step(vm((pod(), waiting)), waiting, *first, nodes=nodes) is None
    assert step(vm((None, waiting)), waiting, nodes=nodes) is None


def test_a_move_to_another_node_than_the_one_under_way_begins_anew() -> None:
    asked = Spec(move_to="n3", template=TEMPLATE)
    under_way = target(move_to="n2")
    found = step(vm((pod(), under_way), spec=asked), pod(), under_way, nodes=(*NODES, node("n3")))
    assert found == Delete(under_way, "the move is given up: it is to go to node n3 now")


def test_a_target_without_a_node_goes_with_its_first_pod() -> None:
    waiting = target(node="", arrived=None)
    assert isinstance(step(vm((pod(), waiting)), waiting), Delete)


def test_a_pod_that_has_lost_its_virtual_machine_is_let_go() -> None:
    left = pod(moved=Said(True, message="n2"))
    assert step(vm((left, None)), left) == Note(Record(node="n2"))


def test_how_a_move_goes_is_said() -> None:
    moving = vm((pod(), target()), eviction=drained(pod()))
    for arrived, trouble, told in (
        (Said(False, "Moving", "half of it"), "", "node n2: half of it"),
        (Said(False, "Undecided"), "", "node n2: Undecided"),
        (None, "ImagePullBackOff", "node n2: ImagePullBackOff"),
        (None, "", "from node n1 to node n2"),
    ):
        seen = target(arrived=arrived, trouble=trouble)
        assert told in planned(moving, pod(), seen, nodes=CORDONED).shown.progress


def test_a_move_that_fails_is_told_in_kubelets_words() -> None:
    failed = target(phase="Failed", trouble="the CPUs differ")
    noted = step(vm((pod(), failed), eviction=drained(pod())), pod(), failed, nodes=CORDONED)
    again = Refusal("the CPUs differ", generation=0, tries=1, at=NOW)
    assert noted.record == vm((pod(), None)).record.replace(pod_refusal=again)
    assert (noted.reason, noted.message) == ("MoveFailed", "the CPUs differ")


def test_a_move_that_fails_each_time_is_tried_less_and_less_often_until_it_works() -> None:
    failed, arrived = target(phase="Failed", trouble="the CPUs differ"), target(arrived=Said(True, "Arrived"))
    record = vm((pod(), failed)).record.replace(pod_refusal=REFUSED)
    seen = vm(record=record, generation=3, eviction=drained(pod()))
    assert step(seen, pod(), failed, nodes=CORDONED).record.pod_refusal.tries == 3
    assert step(seen, pod(), arrived, nodes=CORDONED).record.pod_refusal is None


def test_a_move_that_is_given_up_has_not_failed() -> None:
    ended = target(phase="Failed", deleting=True)
    assert step(vm((pod(), ended)), pod(), ended) == Note(vm((pod(), None)).record)


def test_it_looks_again_when_a_mark_lapses_and_when_an_agent_is_silent() -> None:
    silent_at = NOW - 1 + 60
    assert planned(vm((pod(), None)), pod()).again_at == silent_at
    marked = vm((pod(), None), eviction=drained(pod(), at=NOW - 30))
    assert planned(marked, pod(movable=Said(False, "HostDevices")), nodes=CORDONED).again_at == NOW + 30


def test_a_paused_vm_does_not_move_and_can_be_resumed() -> None:
    """Its agent may have paused it a moment after it has said that it can move; its node then refuses each attempt."""
    paused = pod(paused=Said(True, "Requested"), asked_to_pause=True)
    seen = vm((paused, None), eviction=drained(paused))
    found = planned(seen, paused, nodes=CORDONED)
    assert (found.step, condition(found, "Draining")) == (AskToPause(paused, paused=False), ("False", "CannotMove"))
    assert condition(found, "Movable") == ("False", "Paused")
    assert "cannot move: it is paused" in evicted(seen, paused).message
    under_way = vm((paused, target()), eviction=drained(paused))
    given_up = step(under_way, paused, target(), nodes=CORDONED)
    assert isinstance(given_up, Delete)
    assert (given_up.pod, "it is paused" in given_up.why) == (target(), True)
    committed = target(arrived=Said(False, "Undecided"))
    assert step(vm((paused, committed), eviction=drained(paused)), paused, committed, nodes=CORDONED) is None


def test_nobody_is_warned_of_a_lost_memory_before_the_agent_has_looked() -> None:
    saving = Spec(state=State.SAVED, template=TEMPLATE)
    just_now = planned(vm(spec=saving, record=Record(node="n1", ended_at=NOW - 1)))
    assert (condition(just_now, "Saved"), just_now.again_at) == (("Unknown", "NotSaid"), NOW + 9)
    later = planned(vm(spec=saving, record=Record(node="n1", ended_at=NOW - 10)))
    assert condition(later, "Saved") == ("False", "NotSaved")


def test_what_cannot_move_stays_and_says_why() -> None:
    stuck = pod(movable=Said(False, "HostDevices", "host devices (gpu0)"))
    found = planned(vm((stuck, None), eviction=drained(stuck)), stuck, nodes=CORDONED)
    assert (found.step, condition(found, "Draining")) == (None, ("False", "CannotMove"))


def test_move_to_is_done_once() -> None:
    asked = Spec(move_to="n2", template=TEMPLATE)
    assert step(vm((pod(), None), spec=asked), pod()) == Create(
        Place("n2", never="n1"), restore_from="n1", move_to="n2"
    )
    done = dataclasses.replace(vm((pod(), None), spec=asked).record, moved_to="n2")
    assert step(vm(spec=asked, record=done), pod()) is None


def test_the_memory_of_a_source_that_is_lost_boots_elsewhere() -> None:
    """Its pod and its target are gone: nothing is left to wait for."""
    seen = vm((pod(), None))
    assert isinstance(step(seen, nodes=(node("n2"),)), Forget)
    assert isinstance(step(vm(), nodes=(node("n2"),)), Create)


def test_moves_wait_for_each_other() -> None:
    moving = [pod(f"m{number}", node="n1" if number < 2 else "n9") for number in range(4)]
    limits = MoveLimits()
    assert "2 virtual machines move from node n1" in crowded(vm((pod(), None)), pod(), moving, limits)
    assert crowded(vm((pod(), None)), pod(), moving[1:], limits) == ""
    assert "of the cluster" in crowded(vm((pod(), None)), pod(node="n5"), [*moving, pod("m9")], limits)
    assert crowded(vm((pod(), target())), pod(), moving, limits) == ""  # it moves already
    assert crowded(vm(), None, moving, limits) == ""
    held = step(vm((pod(), None), eviction=drained(pod())), pod(), nodes=CORDONED, crowded="it waits")
    assert held is None


def test_a_vm_whose_agent_has_not_spoken_yet_is_in_no_trouble() -> None:
    young = pod(movable=None)
    found = planned(vm((young, None), eviction=drained(young)), young, nodes=CORDONED)
    assert (condition(found, "Movable"), condition(found, "Draining")) == (("Unknown", "NotSaid"), ("True", "Starting"))
    silent = (node("n1", cordoned=True, agent_at=0.0), node("n2"))
    for one in (young, pod()):
        found = planned(vm((one, None), eviction=drained(one)), one, nodes=silent)
        assert (condition(found, "Movable"), condition(found, "Draining")) == (
            ("Unknown", "NotSaid"),
            ("False", "CannotMove"),
        )


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (pod(deleting=True), "pod db-1 ends: the guest shuts down"),
        (pod(deleting=True, stop_saves=True), "pod db-1 ends: its memory is saved on its node"),
        (pod(deleting=True, stop_saves=True, has_volume=True), "pod db-1 ends: its state goes to its volume"),
    ],
)
def test_what_an_ending_pod_does_with_its_guest_is_said(ending: PodSeen, told: str) -> None:
    ready = planned(vm((ending, None)), ending).shown.conditions[0]
    assert (ready.status, ready.reason, ready.message) == ("False", "Stopping", told)


def test_a_memory_that_went_over_a_volume_is_not_shown_where_it_came_from() -> None:
    """That node keeps its copy, and nobody tells it that the VM continues on another one."""
    there, kept = pod(node="n2", has_volume=True), {"n1": Kept(NOW - 50, 7, NOW + 50)}
    on_volume = Spec(template=ON_VOLUME)
    stopped = planned(vm(kept=kept, spec=Spec(state=State.STOPPED, template=ON_VOLUME)))
    assert (stopped.shown.phase, stopped.shown.saved_on) == ("Saved", "n1")
    continued = planned(vm(kept=kept, spec=on_volume, record=Record(there.ref, node="n2")), there)
    assert (continued.shown.saved_on, condition(continued, "Saved")) == ("", ("False", "NoMemory"))


# --- evictions


def evicted(seen: VmSeen | None, one: PodSeen, *others: PodSeen, nodes: tuple[NodeSeen, ...] = CORDONED) -> Answer:
    return answer(seen, one, (one, *others), nodes, NOW)


UNPROTECTED = Spec(drain=Drain.RESTART, template=TEMPLATE)


@pytest.mark.parametrize(
    ("seen", "one"),
    [
        (None, pod()),
        (vm((pod(), None)), dataclasses.replace(pod(), owner="somebody")),
        (vm((pod(), None)), pod(deleting=True)),
        (vm((pod(), None)), pod(phase="Succeeded")),
        (vm((target(), None), spec=UNPROTECTED), pod()),
        (vm((pod(), None), spec=UNPROTECTED), pod(moved=Said(True, message="n2"))),
        (vm((pod(), None), deleting=True), pod()),
    ],
    ids=[
        "unknown",
        "not its pod",
        "ends already",
        "is over",
        "has moved, as the record says",
        "has moved, as the agent says",
        "its object is deleted",
    ],
)
def test_an_eviction_that_takes_nothing_away_is_allowed(seen: VmSeen | None, one: PodSeen) -> None:
    assert evicted(seen, one) == Answer(allowed=True)


def test_a_move_is_asked_for_once_and_again_when_the_mark_gets_old() -> None:
    first = evicted(vm((pod(), None)), pod())
    assert (first.allowed, first.mark) == (False, Eviction(pod().uid, NOW, cordoned=True))
    assert evicted(vm((pod(), None), eviction=drained(pod(), at=NOW - 5)), pod()).mark is None
    assert evicted(vm((pod(), None), eviction=drained(pod(), at=NOW - 20)), pod()).mark is not None


def test_both_pods_are_protected_during_a_move() -> None:
    moving = vm((pod(), target()), eviction=drained(pod()))
    for one, other in ((pod(), target()), (target(), pod())):
        found = evicted(moving, one, other)
        assert not found.allowed
        assert "half of it" in found.message


def test_a_drain_that_continues_keeps_its_move_going() -> None:
    """The mark is renewed for the first pod, so that a move may last longer than the mark."""
    old = vm((pod(), target()), eviction=drained(pod(), at=NOW - 20))
    assert evicted(old, pod(), target()).mark == Eviction(pod().uid, NOW, cordoned=True)
    assert evicted(old, target(), pod()).mark is None
    fresh = vm((pod(), target()), eviction=drained(pod(), at=NOW - 5))
    assert evicted(fresh, pod(), target()).mark is None


def test_a_cordon_that_is_seen_after_the_first_request_is_marked_too() -> None:
    """`kubectl uncordon` could not stop the drain otherwise."""
    early = drained(pod(), cordoned=False)
    for seen, others in ((vm((pod(), None), eviction=early), ()), (vm((pod(), target()), eviction=early), (target(),))):
        assert evicted(seen, pod(), *others).mark == Eviction(pod().uid, NOW, cordoned=True)
        assert evicted(seen, pod(), *others, nodes=NODES).mark is None


def test_a_pod_that_nobody_has_seen_may_go() -> None:
    assert answer(vm((pod(), None)), None, (pod(),), NODES, NOW) == Answer(allowed=True)


def test_a_target_that_is_not_seen_yet_protects_both_pods_too() -> None:
    """Pods may be seen later than the record that names them."""
    moving = vm((pod(), target()), spec=Spec(drain=Drain.RESTART, template=TEMPLATE))
    found = evicted(moving, pod())
    assert (found.allowed, "it moves" in found.message) == (False, True)


def test_after_the_move_the_first_pod_may_go_and_the_other_one_stays() -> None:
    there = target(arrived=Said(True))
    moving = vm((pod(), there), eviction=drained(pod()), spec=UNPROTECTED)
    assert evicted(moving, pod(), there).allowed
    assert not evicted(moving, there, pod()).allowed


def test_where_a_budget_would_refuse_the_pod_that_a_vm_has_left_the_answer_says_why() -> None:
    there, left = target(arrived=Said(True)), pod(moved=Said(True, message="n2"))
    for seen, one in ((vm((pod(), there)), pod()), (vm((there, None)), pod()), (vm((left, None)), left)):
        found = evicted(seen, one, there)
        assert (found.allowed, "it has moved, and this pod ends" in found.message) == (False, True)


@pytest.mark.parametrize(
    ("drain", "one", "allowed", "told"),
    [
        (Drain.BLOCK, pod(), False, "spec.drain is Block"),
        (Drain.RESTART, pod(), True, ""),
        (Drain.SAVE, pod(stop_saves=True), True, ""),
        (Drain.SAVE, pod(), False, "would lose its memory; restart it"),
        (
            Drain.MOVE,
            pod(movable=Said(False, "HostDevices", "host devices (gpu0)")),
            False,
            "cannot move: host devices",
        ),
        (Drain.MOVE, pod(movable=None), False, "it starts, and moves then"),
        (Drain.MOVE, pod(has_volume=True), False, "goes to its volume"),
        (Drain.MOVE, pod(runs=False), False, "it starts, and moves then"),
        (Drain.MOVE, new(), True, ""),
    ],
)
def test_what_a_drain_does_is_said(drain: Drain, one: PodSeen, allowed: bool, told: str) -> None:
    found = evicted(vm((one, None), spec=Spec(drain=drain, template=TEMPLATE)), one)
    assert found.allowed is allowed
    assert told in found.message
