"""With calls, failures, kills and reboots in any order, lists always answer, states are legal, and nothing is left
over."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from fakes.examples import examples
from fakes.journal import Crash, When
from fakes.world import IMAGE, World, container_config, sandbox_config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from virtshim.cri.to_proto import container_item, container_status, sandbox_item, sandbox_status
from virtshim.model.container import ContainerPhase
from virtshim.model.errors import InternalError, Kind, ShimError
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import SandboxPhase
from virtshim.model.vm import OffReason
from virtshim.pods.lookup import Filter, find_container, find_sandbox, list_containers, list_sandboxes

TROUBLE = [
    *("networks.attach", "networks.release", "disks.create", "disks.delete", "seeds.create"),
    *("vms.define", "vms.start", "vms.destroy", "vms.undefine", "vms.power", "vms.ask_to_shut_down"),
    *("consoles.open", "consoles.finish"),
    *(f"records.{table}.{verb}" for table in ("sandboxes", "containers") for verb in ("add", "replace", "delete")),
]

# The kinds of error that a use case may raise. INTERNAL is the kind of the injected trouble; an exception of another
# type fails the test.
EXPECTED = {Kind.INTERNAL, Kind.NOT_FOUND, Kind.FAILED_PRECONDITION, Kind.ALREADY_EXISTS, Kind.INVALID}


class PodLife(RuleBasedStateMachine):
    sandboxes = Bundle("sandboxes")
    containers = Bundle("containers")

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="pod-life-")
        self.world = World(Path(self.directory))
        self.world.pull()
        self.created: dict[str, int] = {}

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world = self.world.recovered()
            self.everything_can_be_removed()
        finally:
            self.world.close()
            shutil.rmtree(self.directory)

    def everything_can_be_removed(self) -> None:
        for sandbox in list_sandboxes(self.world.records, Filter()):
            self.world.do.stop_sandbox.stop(sandbox, self.world.deadline())
            self.world.do.remove_sandbox.remove(sandbox, self.world.deadline())
        self.world.images.remove(IMAGE)
        assert self.world.everything() == []
        assert self.world.outside.files.files == {}

    def attempt(self, call: Any) -> Any:
        """The answer, or None if the call was refused or the process died in it."""
        refusal: ShimError | None = None
        try:
            return call()
        except ShimError as error:
            refusal = error
        except Crash:
            self.world = self.world.recovered()
        assert refusal is None or (refusal.kind in EXPECTED and str(refusal)), refusal
        return None

    # --- calls

    @rule(target=sandboxes, n=st.integers(0, 2), attempt=st.integers(0, 1), other=st.booleans())
    def run(self, n: int, attempt: int, other: bool) -> Any:
        config = sandbox_config(hostname="other" if other else "web")
        made = self.attempt(lambda: self.world.run(f"pod-{n}", attempt, config))
        return made if made is not None else multiple()

    @rule(target=containers, sandbox=sandboxes, attempt=st.integers(0, 1), other=st.booleans())
    def create(self, sandbox: SandboxId, attempt: int, other: bool) -> Any:
        config = container_config(args=("other",) if other else ())
        made = self.attempt(lambda: self.world.create(sandbox, "vm", attempt, config))
        return made if made is not None else multiple()

    @rule(container=containers)
    def start(self, container: ContainerId) -> None:
        if (found := find_container(self.world.records, container.value)) is not None:
            self.attempt(lambda: self.world.do.start_container.start(found))

    @rule(container=containers, grace=st.integers(0, 40))
    def stop(self, container: ContainerId, grace: int) -> None:
        if (found := find_container(self.world.records, container.value)) is not None:
            self.attempt(lambda: self.world.do.stop_container.stop(found, grace))

    @rule(container=containers)
    def remove(self, container: ContainerId) -> None:
        if (found := find_container(self.world.records, container.value)) is not None:
            self.attempt(lambda: self.world.do.remove_container.remove(found))

    @rule(sandbox=sandboxes)
    def stop_sandbox(self, sandbox: SandboxId) -> None:
        if (found := find_sandbox(self.world.records, sandbox.value)) is not None:
            self.attempt(lambda: self.world.do.stop_sandbox.stop(found, self.world.deadline()))

    @rule(sandbox=sandboxes)
    def remove_sandbox(self, sandbox: SandboxId) -> None:
        if (found := find_sandbox(self.world.records, sandbox.value)) is not None:
            self.attempt(lambda: self.world.do.remove_sandbox.remove(found, self.world.deadline()))

    @rule(again=st.booleans())
    def remove_image(self, again: bool) -> None:
        self.attempt(lambda: self.world.images.remove(IMAGE))
        if again:
            self.attempt(self.world.pull)

    # --- what happens

    @rule(container=containers, reason=st.sampled_from(list(OffReason)))
    def guest_ends(self, container: ContainerId, reason: OffReason) -> None:
        if (found := self.world.records.containers.get(container)) is not None:
            self.world.outside.vms.end(self.world.domain(found.id), reason)

    @rule(seconds=st.sampled_from([0.0, 3.0, None]))
    def guests_listen_or_not(self, seconds: float | None) -> None:
        self.world.outside.vms.shuts_down_after = seconds

    @rule()
    def power_events_arrive(self) -> None:
        self.attempt(self.world.outside.vms.deliver)

    @rule(name=st.sampled_from(TROUBLE), after=st.booleans(), times=st.integers(1, 2))
    def something_will_fail(self, name: str, after: bool, times: int) -> None:
        # A transaction that failed had no effect; a console is not followed any more, whatever went wrong.
        after = name == "consoles.finish" or (after and not name.startswith("records"))
        self.world.journal.fail(name, InternalError(f"{name} does not work today"), times=times, after=after)

    @rule()
    def all_works_again(self) -> None:
        self.world.journal.heal()

    @rule(seconds=st.integers(0, 1000))
    def the_clock_is_set_back(self, seconds: int) -> None:
        self.world.outside.clock.set_back(seconds)

    @rule(at=st.integers(1, 8), when=st.sampled_from(list(When)))
    def the_process_will_die(self, at: int, when: When) -> None:
        self.world.journal.crash(at, when)

    @rule(rebooted=st.booleans())
    def restart(self, rebooted: bool) -> None:
        self.world = self.world.recovered(rebooted=rebooted)

    # --- what always holds

    @invariant()
    def lists_answer_and_states_are_legal(self) -> None:
        records = self.world.records
        pods = list_sandboxes(records, Filter())
        vms = list_containers(records, Filter())
        for sandbox in pods:
            assert sandbox.phase in (SandboxPhase.READY, SandboxPhase.NOT_READY)
            item, status = sandbox_item(sandbox), sandbox_status(sandbox)
            assert item.metadata.name
            assert item.created_at == status.created_at == self.created.setdefault(item.id, item.created_at)
        for container in vms:
            item, status = container_item(container), container_status(container)
            assert item.metadata.name
            assert status.image.image
            assert status.image_ref
            assert item.created_at == status.created_at == self.created.setdefault(item.id, item.created_at)
            if container.phase is ContainerPhase.EXITED:
                assert status.reason
                assert status.created_at <= status.finished_at
        assert len({thing.created_at for thing in (*pods, *vms)}) == len(pods) + len(vms)

    @invariant()
    def nothing_is_there_that_no_record_knows(self) -> None:
        assert self.world.leftovers() == []

    @invariant()
    def one_vm_runs_in_a_pod(self) -> None:
        running = [c.sandbox_id for c in self.world.records.containers.all() if c.phase is ContainerPhase.RUNNING]
        assert len(running) == len(set(running))


PodLife.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrderOfCalls = PodLife.TestCase
