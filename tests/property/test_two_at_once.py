"""Concurrent calls of kubelet, watchers and repairs may be interrupted and killed at any of their steps."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fakes.examples import examples
from fakes.guests import SlowGuests
from fakes.journal import Crash, When
from fakes.turns import Call, NoThread, Turn, Turns
from fakes.waiting import eventually
from fakes.world import IMAGE, Outside, World, container_config, pod_key, sandbox_config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from virtshim.devices.values import CriDevice
from virtshim.images.service import stored_images
from virtshim.model.container import Container, ContainerPhase, Resources
from virtshim.model.errors import InternalError, ShimError
from virtshim.model.ids import ContainerId
from virtshim.model.sandbox import Sandbox, disk_name
from virtshim.model.vm import OffReason
from virtshim.store.records import SqliteRecords
from virtshim.templates.guest_identity import BECOME

KEPT = {"virtshim.io/root-disk": "pod"}
ROOM = {"virtshim.io/max-vcpus": "4", "virtshim.io/max-memory": "2Gi"}
ONE_UUID = {"VirtletSystemUUID": "53008994-44c0-4017-ad44-9c49758083da"}
SYSCTLS = {"net.core.somaxconn": "321"}
START, GROWN, SHRUNK = (
    Resources(cpu_quota=100_000 * cpus, cpu_period=100_000, memory_limit_bytes=memory << 20)
    for cpus, memory in ((1, 1024), (2, 2048), (1, 512))
)
WITH_DEVICE = container_config(devices=(CriDevice("/dev/vfio/7", "/dev/vfio/7"),))

PODS = {
    "keeps": (sandbox_config(annotations=KEPT | ROOM | ONE_UUID, sysctls=SYSCTLS), container_config(resources=START)),
    "keeps-device": (sandbox_config(annotations=KEPT, sysctls=SYSCTLS), WITH_DEVICE),
    "device": (sandbox_config(sysctls=SYSCTLS), WITH_DEVICE),
}
# The pod whose guest comes from a template of its node.
WARM = "warm"
WARM_PODS = {
    WARM: (
        sandbox_config(annotations={"virtshim.io/warm-start": "true"}, sysctls=SYSCTLS),
        container_config(resources=Resources(memory_limit_bytes=128 << 20)),
    )
}
CONFIGS = PODS | WARM_PODS
# Bytes for templates.
TEMPLATES = 1 << 30


class Node:
    """A node whose threads take turns."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.directory = Path(tempfile.mkdtemp(prefix="two-at-once-"))
        self.outside = Outside(clock=turns.clock)
        self.outside.guests = self.guests = SlowGuests(turns, self._boots)
        self.outside.devices.add_function("/dev/vfio/7", "0000:3b:00.1")
        self.outside.journal.on_call = turns.point
        self.turns.watch = self.wrong
        self.busy: set[str] = set()
        self.served_by(World(self.directory, self.outside, templates={"max_bytes": TEMPLATES}))
        self.world.pull()

    def served_by(self, world: World) -> None:
        self.world = world
        self.outside.vms.on_power_event(world.app.guest_set_up.changed)

    def make_template(self) -> None:
        """Of the machine of warm pods, before anybody takes turns: templates are made by a thread that takes none."""
        config, container = WARM_PODS[WARM]
        sandbox = self.world.run("first", config=config)
        self.world.start(self.world.create(sandbox, config=container))
        eventually(self.world.app.warm.templates.kept)
        self.world.remove_sandbox(sandbox)

    def close(self) -> None:
        self.world.close()
        shutil.rmtree(self.directory)

    def _boots(self, container: ContainerId) -> int:
        """The number of boots, a guest from a template counted as one; 0 if it is off."""
        for there in self.outside.vms.domains.values():
            if there.spec is not None and there.spec.container_id == container and there.state.is_on:
                return there.boots + 1
        return 0

    # --- what there is

    def sandboxes(self, pod: str) -> list[Sandbox]:
        return [one for one in self.world.records.sandboxes.all() if one.key.name == pod]

    def containers(self, pod: str) -> list[Container]:
        """The containers in order of creation."""
        of_pod = {one.id for one in self.sandboxes(pod)}
        return [one for one in self.world.records.containers.all() if one.sandbox_id in of_pod and one.is_visible]

    # --- what must hold at each point

    def wrong(self, point: str) -> str:
        on = self.outside.vms.running()
        for what, several in (
            ("disk", Counter(spec.disks[0].path for spec in on)),
            ("sandbox", Counter(spec.sandbox_id for spec in on)),
        ):
            if twice := [key for key, count in several.items() if count > 1]:
                return f"two VMs run with {what} {twice}"
        for container in self.world.records.containers.all():
            if missing := self._missing(container):
                return f"container {container.id.short} is {container.phase.value}, and {missing}"
            if container.is_running and container.status.warm_started and container.id not in self._own():
                return f"container {container.id.short} is running, and its guest is not one of its own"
        for spec in on:
            record = self.world.records.containers.get(spec.container_id)
            plugged = self.outside.vms.domains[spec.uuid].plugged
            if plugged and (record is None or not record.holds_its_claims):
                return f"VM {spec.name} has a device that its container does not hold"
            if plugged and point == "drivers.reset":
                return f"a device is reset that VM {spec.name} has"
        return ""

    def _own(self) -> set[ContainerId]:
        """The guests from a template that are guests of their own."""
        return {one for one, script, *_ in self.guests.scripts if script == BECOME}

    def _missing(self, container: Container) -> str:
        if container.phase not in (ContainerPhase.CREATED, ContainerPhase.RUNNING):
            return ""
        if gone := [image for image in stored_images(container) if image not in self.outside.files.stored()]:
            return f"its image {gone} is gone"
        name = container.spec.pod_disk
        if name:
            return "" if name in self.outside.disks.pod_disks else "its pod's disk is gone"
        return "" if "root.qcow2" in self.outside.disks.directories.get(container.id, ()) else "its disk is gone"

    # --- what must hold when nothing goes on

    def lies(self) -> Iterator[str]:
        records = self.world.records
        for container in records.containers.all():
            vm = f"VM of container {container.id.short} ({container.phase.value})"
            boot = self._boots(container.id)
            if boot and not container.is_running and not container.may_be_running:
                yield f"{vm} is on"
            if container.is_running and not boot:
                yield f"{vm} is off"
            if container.is_running and boot and self.guests.set_up.get(container.id) != boot:
                yield f"{vm} is not set up since its start {boot}"
            if container.owes_devices:
                yield f"{vm} owes its devices"
        for spec in self.outside.vms.running():
            if records.containers.get(spec.container_id) is None:
                yield f"VM {spec.name} has no record"
        stored = SqliteRecords(str(self.directory / "state.db"))
        try:
            for mine, its in ((records.sandboxes, stored.sandboxes), (records.containers, stored.containers)):
                if sorted(mine.all(), key=lambda one: one.id) != sorted(its.all(), key=lambda one: one.id):  # type: ignore[attr-defined]
                    yield "the database has other records than memory"
        finally:
            stored.close()


# --- what may be done at once: to the pod's oldest or newest, whatever is there


def oldest_or_newest(there: list[Any], newest: bool) -> Any:
    return there[-1 if newest else 0]


def run(node: Node, pod: str, newest: bool) -> None:
    node.world.run(pod, int(newest), CONFIGS[pod][0])


def create(node: Node, pod: str, newest: bool) -> None:
    there = [one.id for one in node.sandboxes(pod)] or [node.world.run(pod, 0, CONFIGS[pod][0])]
    node.world.create(there[-1], attempt=int(newest), config=CONFIGS[pod][1])


def bring_up(node: Node, pod: str, newest: bool) -> None:
    sandbox = node.world.run(pod, int(newest), CONFIGS[pod][0])
    container = node.world.create(sandbox, config=CONFIGS[pod][1])
    node.world.do.start_container.start(node.world.container(container))


def start(node: Node, pod: str, newest: bool) -> None:
    if there := node.containers(pod):
        node.world.do.start_container.start(oldest_or_newest(there, newest))


def stop(node: Node, pod: str, newest: bool) -> None:
    if there := node.containers(pod):
        node.world.do.stop_container.stop(there[-1], 30.0 if newest else 0.0)


def remove(node: Node, pod: str, newest: bool) -> None:
    if there := node.containers(pod):
        node.world.do.remove_container.remove(oldest_or_newest(there, newest))


def stop_sandbox(node: Node, pod: str, newest: bool) -> None:
    if there := node.sandboxes(pod):
        node.world.do.stop_sandbox.stop(oldest_or_newest(there, newest), node.world.deadline())


def remove_sandbox(node: Node, pod: str, newest: bool) -> None:
    if there := node.sandboxes(pod):
        node.world.do.remove_sandbox.remove(oldest_or_newest(there, newest), node.world.deadline())


def resize(node: Node, pod: str, newest: bool) -> None:
    if there := node.containers(pod):
        node.world.do.update_container_resources.resize(there[-1], GROWN if newest else SHRUNK)


def restart_guest(node: Node, pod: str, newest: bool) -> None:
    for container in node.containers(pod):
        if container.is_running:
            node.outside.vms.reset(container.domain_uuid)
    tell(node)


def end_guest(node: Node, pod: str, newest: bool) -> None:
    for container in node.containers(pod):
        node.outside.vms.end(container.domain_uuid, OffReason.SHUTDOWN if newest else OffReason.CRASHED)
    tell(node)


def once_at_a_time(node: Node, thread: str, do: Callable[[], object]) -> None:
    """Runs like a singleton thread."""
    if thread not in node.busy:
        node.busy.add(thread)
        try:
            do()
        finally:
            node.busy.discard(thread)


def tell(node: Node, *_: object) -> None:
    """Delivers events like libvirt's event thread, which survives."""
    with contextlib.suppress(NoThread):
        once_at_a_time(node, "events", node.outside.vms.deliver)


def watch(node: Node, *_: object) -> None:
    once_at_a_time(node, "watch", node.world.app.watch.look)


def repair(node: Node, *_: object) -> None:
    """Repairs; leftovers are old enough to be removed."""

    def look_twice() -> None:
        node.world.app.recovery.reconcile.look()
        node.outside.clock.advance(61)
        node.world.app.recovery.reconcile.look()

    once_at_a_time(node, "repair", look_twice)


def pull(node: Node, *_: object) -> None:
    node.world.pull()


def remove_image(node: Node, *_: object) -> None:
    node.world.images.remove(IMAGE)


OF_A_POD = [
    *(run, create, create, bring_up, bring_up, start, stop, remove, stop_sandbox, remove_sandbox, remove_sandbox),
    *(resize, restart_guest, restart_guest, end_guest),
]
WATCHERS = [watch, repair, repair]
OF_IMAGES = [pull, remove_image]


# --- how it begins


def an_empty_node(node: Node, pod: str) -> None: ...


def a_pod_that_runs(node: Node, pod: str) -> None:
    bring_up(node, pod, newest=False)


def a_pod_that_was_stopped(node: Node, pod: str) -> None:
    bring_up(node, pod, newest=False)
    stop_sandbox(node, pod, newest=False)


def a_pod_that_was_never_started(node: Node, pod: str) -> None:
    create(node, pod, newest=False)


def a_disk_whose_pod_is_not_known(node: Node, pod: str) -> None:
    """The state after a lost database."""
    (image,) = node.world.images.all()
    node.outside.disks.pod_disks[disk_name(pod_key(pod), "vm")] = image.digest


def a_start_that_could_not_be_undone(node: Node, pod: str) -> None:
    node.world.journal.fail("vms.start", InternalError("no"), after=True)
    node.world.journal.fail("vms.destroy", InternalError("its QEMU hangs"))
    with contextlib.suppress(InternalError):
        bring_up(node, pod, newest=False)


BEGINNINGS = [
    an_empty_node,
    a_pod_that_runs,
    a_pod_that_runs,
    a_pod_that_was_stopped,
    a_pod_that_was_never_started,
    a_disk_whose_pod_is_not_known,
    a_start_that_could_not_be_undone,
]

TROUBLE = [RuntimeError("can't start new thread"), OSError(24, "Too many open files"), InternalError("no")]

MINE, OTHER = "mine", "another"
of_mine = st.tuples(st.sampled_from(OF_A_POD), st.just(MINE), st.booleans())
of_another = st.tuples(st.sampled_from(OF_A_POD), st.just(OTHER), st.booleans())
of_watchers = st.tuples(st.sampled_from(WATCHERS), st.just(""), st.just(False))
of_images = st.tuples(st.sampled_from(OF_IMAGES), st.just("images"), st.just(False))
# Two calls for the same pod are the most frequent choice.
actions = st.one_of(of_mine, of_mine, of_mine, of_another, of_watchers, of_images)
# After how many steps which other thread continues.
orders = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), max_size=4)


class Stage:
    """A node with two pods. One of them is in the state `beginning`."""

    def __init__(self, beginning: Any, mine: str, another: str) -> None:
        self.pods = {MINE: mine, OTHER: another}
        self.parts = contextlib.ExitStack()
        numbers = itertools.count()
        # The same names each time, so that sorting by them gives the same order.
        self.parts.enter_context(
            patch("secrets.token_hex", lambda size: hashlib.sha256(b"%d" % next(numbers)).hexdigest()[: 2 * size])
        )
        self.turns = Turns()
        self.parts.enter_context(self.turns.installed())
        self.node = Node(self.turns)
        self.parts.callback(self._close_node)
        if mine == WARM:
            self.node.make_template()
        self.alone("beginning", lambda: beginning(self.node, mine))
        self.settle()

    def close(self) -> None:
        self.parts.close()

    def _close_node(self) -> None:
        self.node.close()

    def make(
        self,
        what: list[Any],
        order: Any,
        error: Exception | None = None,
        *,
        settle: bool = True,
        slow: bool = False,
    ) -> list[Turn]:
        calls = [self.call(*one) for one in what]
        turns = self.turns.run(calls, order, outside_is_slow=slow)
        self.refuse_odd_errors(turns, error)
        if settle:
            self.settle()
        return turns

    def call(self, do: Any, pod: str, newest: bool) -> Call:
        pod = self.pods.get(pod, pod)
        # One thread delivers the events of all pods here; the product's workers deliver them in parallel.
        about = "" if do in (restart_guest, end_guest) else pod
        return Call(f"{do.__name__} {pod} {newest}", lambda: do(self.node, pod, newest), about)

    def refuse_odd_errors(self, turns: list[Turn], own: Exception | None = None) -> None:
        for turn in turns:
            if (
                turn.error is not None
                and turn.error is not own
                and not isinstance(turn.error, (ShimError, NoThread, Crash))
            ):
                raise AssertionError(f"{turn.name} fails:\n{self.turns.story()}") from turn.error

    def fail_the_next_start(self, error: Exception, *, undo_fails: bool) -> None:
        self.node.world.journal.fail("vms.start", error, after=True)
        if undo_fails:
            self.node.world.journal.fail("vms.destroy", InternalError("its QEMU hangs"))

    def alone(self, name: str, do: Callable[[], object]) -> None:
        self.refuse_odd_errors(self.turns.run([Call(name, do)]))

    def refuse_a_thread(self, what: list[Any], order: Any, after: int = 0) -> bool:
        """Refuses the first thread after so many; returns whether there was one."""
        self.turns.refuse(after=after)
        self.make(what, order, settle=False)
        was_asked = not self.turns.refusals
        self.turns.refuse(0)
        self.settle()
        return was_asked

    def settle(self) -> None:
        """Delivers all events and waits until all work has ended."""
        before = self.turns.story()
        self.node.world.journal.revive()
        self.alone("events", lambda: tell(self.node))
        self.alone("watch", lambda: watch(self.node))
        lies = list(self.node.lies())
        assert not lies, "\n".join([*lies, before])

    def close_when_all_is_well(self) -> None:
        dead = self.turns.remembered()
        self.close()
        assert not dead, f"threads are remembered that do not run: {dead}"


class TwoAtOnce(RuleBasedStateMachine):
    @initialize(beginning=st.sampled_from(BEGINNINGS), pods=st.permutations(list(PODS)))
    def begin(self, beginning: Any, pods: list[str]) -> None:
        self.stage = Stage(beginning, pods[0], pods[1])

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.stage.close_when_all_is_well()

    @rule(first=actions, second=actions, order=orders, slow=st.booleans())
    def two_at_once(self, first: Any, second: Any, order: Any, slow: bool) -> None:
        self.stage.make([first, second], order, slow=slow)

    @rule(first=actions, second=actions, third=actions, order=orders, slow=st.booleans())
    def three_at_once(self, first: Any, second: Any, third: Any, order: Any, slow: bool) -> None:
        self.stage.make([first, second, third], order, slow=slow)

    @rule(first=actions, second=actions, order=orders, error=st.sampled_from(TROUBLE), undo_fails=st.booleans())
    def while_a_start_fails(self, first: Any, second: Any, order: Any, error: Exception, undo_fails: bool) -> None:
        self.stage.fail_the_next_start(error, undo_fails=undo_fails)
        self.stage.make([first, second], order, error)

    @rule(first=actions, second=actions, order=orders)
    def while_a_thread_is_not_to_be_had(self, first: Any, second: Any, order: Any) -> None:
        self.stage.refuse_a_thread([first, second], order)

    @rule(first=actions, second=actions, order=orders, at=st.integers(1, 25), when=st.sampled_from(list(When)))
    def until_it_is_killed(self, first: Any, second: Any, order: Any, at: int, when: When) -> None:
        self.stage.node.world.journal.crash(at, when)
        if any(isinstance(turn.error, Crash) for turn in self.stage.make([first, second], order, settle=False)):
            self.stage.node.served_by(self.stage.node.world.restarted())
            self.stage.alone("recovery", lambda: self.stage.node.world.app.recovery.recover.run(rebooted=False))
        self.stage.settle()


class TwoAtOnceAgain(TwoAtOnce):
    """More orders: one test alone would exceed the time limit."""


for machine in (TwoAtOnce, TwoAtOnceAgain):
    machine.TestCase.settings = settings(
        max_examples=examples(500, share=8),
        stateful_step_count=6,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
# The collector may call SQLAlchemy in a thread that the scheduler ends.
_COLLECTED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TestTwoAtOnce = _COLLECTED(pytest.mark.timeout(1200)(TwoAtOnce.TestCase))
TestTwoAtOnceAgain = _COLLECTED(pytest.mark.full(pytest.mark.timeout(1200)(TwoAtOnceAgain.TestCase)))


# --- what is worth each point


@pytest.mark.parametrize("beginning", dict.fromkeys(BEGINNINGS), ids=lambda one: one.__name__)
@pytest.mark.parametrize("mine", ["keeps", pytest.param("keeps-device", marks=pytest.mark.full), "device"])
def test_slow_external_calls_block_no_other_pod_and_no_pull(
    beginning: Any, mine: str, request: pytest.FixtureRequest
) -> None:
    another = "device" if mine != "device" else "keeps"
    which = (False, True) if request.config.getoption("--all") else (True,)
    for do, newest in itertools.product(dict.fromkeys(OF_A_POD), which):
        with contextlib.closing(Stage(beginning, mine, another)) as stage:
            stage.make([(do, MINE, newest), (create, OTHER, False), (pull, "images", False)], [], slow=True)


@pytest.mark.parametrize("undo_fails", [False, True])
@pytest.mark.parametrize("error", TROUBLE, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("mine", ["keeps", "device"])
def test_a_failed_start_leaves_nothing_that_other_calls_cannot_end(
    mine: str, error: Exception, undo_fails: bool
) -> None:
    for do, newest in itertools.product((stop, stop_sandbox, remove_sandbox, create, repair), (False, True)):
        with contextlib.closing(Stage(a_pod_that_was_never_started, mine, "keeps-device")) as stage:
            stage.fail_the_next_start(error, undo_fails=undo_fails)
            stage.make([(start, MINE, False)], [], error, settle=not undo_fails)
            stage.make([(do, MINE, newest)], [])


@pytest.mark.parametrize("mine", ["keeps", "device"])
def test_the_system_may_refuse_each_thread_once(mine: str) -> None:
    asked = 0
    for beginning, do in ((an_empty_node, bring_up), (a_pod_that_runs, restart_guest), (a_pod_that_runs, end_guest)):
        for after in itertools.count():
            stage = Stage(beginning, mine, "keeps-device")
            was_asked = stage.refuse_a_thread([(do, MINE, True)], [], after)
            stage.close_when_all_is_well()
            if not was_asked:
                break
            asked += 1
    assert asked, "nobody asks for a thread"


# The initial state, the call, and the calls between its steps, for the same pod.
PAIRS = [
    (a_pod_that_was_stopped, (remove_sandbox, False), (bring_up, True)),
    (a_pod_that_was_stopped, (repair, False), (bring_up, True)),
    (a_disk_whose_pod_is_not_known, (repair, False), (bring_up, False)),
    (a_pod_that_runs, (restart_guest, False), (restart_guest, False)),
    (a_pod_that_runs, (restart_guest, False), (stop, True)),
    (a_pod_that_runs, (resize, True), (stop_sandbox, False)),
    (a_pod_that_runs, (resize, False), (restart_guest, False)),
    (a_pod_that_runs, (end_guest, True), (remove, False)),
    (a_pod_that_runs, (remove_sandbox, False), (bring_up, True)),
    (a_pod_that_runs, (stop, True), (remove_sandbox, False)),
    (a_pod_that_was_never_started, (start, False), (stop_sandbox, False)),
    (a_pod_that_was_never_started, (start, False), (repair, False)),
    (a_pod_that_was_never_started, (create, True), (start, False)),
    (an_empty_node, (bring_up, False), (remove_sandbox, False)),
    (an_empty_node, (bring_up, False), (repair, False)),
    (a_start_that_could_not_be_undone, (create, True), (repair, False)),
]


@pytest.mark.parametrize(
    ("beginning", "first", "second"), PAIRS, ids=[f"{b.__name__}-{f[0].__name__}-{s[0].__name__}" for b, f, s in PAIRS]
)
def test_two_calls_may_interleave_at_any_step(
    beginning: Any, first: Any, second: Any, request: pytest.FixtureRequest
) -> None:
    interleave(beginning, first, second, list(PODS) if request.config.getoption("--all") else ["keeps"])


# The calls between the steps of a start from a template.
BESIDE_A_WARM_START = [
    (stop, True),
    (stop_sandbox, False),
    (repair, False),
    pytest.param((remove, False), marks=pytest.mark.full),
    pytest.param((remove_sandbox, False), marks=pytest.mark.full),
]


@pytest.mark.parametrize("second", BESIDE_A_WARM_START, ids=lambda one: one[0].__name__)
def test_a_start_from_a_template_and_another_call_may_interleave_at_any_step(second: Any) -> None:
    interleave(a_pod_that_was_never_started, (start, False), second, [WARM])


def interleave(beginning: Any, first: Any, second: Any, pods: Iterable[str]) -> None:
    for mine, turned in itertools.product(pods, (False, True)):
        calls = [(do, MINE, newest) for do, newest in ((second, first) if turned else (first, second))]
        with contextlib.closing(Stage(beginning, mine, "device")) as stage:
            stage.make(calls[:1], [], settle=False)
            steps = [at for at, said in enumerate(stage.turns.trace) if ": lock " not in said]
        for at in steps:
            with contextlib.closing(Stage(beginning, mine, "device")) as stage:
                stage.make(calls, [(at, 0)])
