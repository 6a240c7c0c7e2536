"""Each answer and each list agrees with a model, after any sequence of calls and restarts over the wire."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from fakes.cri import served
from fakes.examples import examples
from fakes.world import IMAGE, Outside
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason

READY, NOTREADY = pb.SANDBOX_READY, pb.SANDBOX_NOTREADY
CREATED, RUNNING, EXITED = pb.CONTAINER_CREATED, pb.CONTAINER_RUNNING, pb.CONTAINER_EXITED


@dataclass
class Pod:
    key: tuple[int, int]
    hostname: str
    state: int = READY


@dataclass
class Vm:
    sandbox: str
    attempt: int
    args: list[str]
    state: int = CREATED
    exit_code: int = 0


class Node:
    """`pods` and `vms` are the model, by id and in order of creation. Each step concerns one of them, or a removed one:
    `pick` chooses. `this` and `that` are the step's other choices."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="model-")
        self.outside = Outside()
        self.pods: dict[str, Pod] = {}
        self.vms: dict[str, Vm] = {}
        self.gone = "f" * 64
        self.serve()
        self.world.pull()
        self.image = True

    def serve(self) -> None:
        self.node = contextlib.ExitStack()
        self.world, self.client, _ = self.node.enter_context(served(Path(self.directory), self.outside))

    def end(self) -> None:
        with self.node:
            for sandbox in self.pods:
                self.client.remove_pod(sandbox)
            self.client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=IMAGE)))
            assert self.world.everything() == self.world.leftovers() == []
        shutil.rmtree(self.directory)

    def check(self) -> None:
        assert [(item.id, item.state) for item in self.client.pods()] == [
            (made, pod.state) for made, pod in self.pods.items()
        ]
        assert [(item.id, item.state, item.pod_sandbox_id) for item in self.client.containers()] == [
            (made, vm.state, vm.sandbox) for made, vm in self.vms.items()
        ]
        assert len(self.client.ListImages(pb.ListImagesRequest()).images) == self.image
        assert self.world.leftovers() == []

    def pod(self, pick: int) -> str:
        return self.one_of(list(self.pods), pick)

    def vm(self, pick: int) -> str:
        return self.one_of(list(self.vms), pick)

    def one_of(self, there: list[str], pick: int) -> str:
        return there[pick % len(there)] if there and pick else self.gone

    def answer(self, expected: str, call: Any) -> Any:
        """The answer, or None for the expected refusal."""
        try:
            answer = call()
        except grpc.RpcError as error:
            assert error.code().name == expected, error.details()
            return None
        assert expected == "ok"
        return answer

    # --- pods

    def run(self, pick: int, this: bool, that: bool) -> None:
        key, hostname = (pick % 2, int(this)), "b" if that else "a"
        there = next(((made, pod) for made, pod in self.pods.items() if pod.key == key), None)
        taken = there is not None and (there[1].hostname != hostname or there[1].state != READY)
        made = self.answer(
            "ALREADY_EXISTS" if taken else "ok", lambda: self.client.run(f"pod-{key[0]}", key[1], hostname=hostname)
        )
        if made is not None:
            assert there is None or made == there[0]
            self.pods.setdefault(made, Pod(key, hostname))

    def stop_pod(self, pick: int, this: bool, that: bool) -> None:
        sandbox = self.pod(pick)
        self.client.stop_pod(sandbox)
        if sandbox in self.pods:
            self.pods[sandbox].state = NOTREADY
        for vm in self.vms.values():
            if vm.sandbox == sandbox and vm.state == RUNNING:
                vm.state, vm.exit_code = EXITED, 137

    def remove_pod(self, pick: int, this: bool, that: bool) -> None:
        sandbox = self.pod(pick)
        self.client.remove_pod(sandbox)
        if self.pods.pop(sandbox, None):
            self.gone = sandbox
        self.vms = {made: vm for made, vm in self.vms.items() if vm.sandbox != sandbox}

    def pod_status(self, pick: int, this: bool, that: bool) -> None:
        sandbox = self.pod(pick)
        expected = "ok" if sandbox in self.pods else "NOT_FOUND"
        status = self.answer(expected, lambda: self.client.pod_status(sandbox[:20]))
        assert status is None or (status.id, status.state) == (sandbox, self.pods[sandbox].state)

    # --- containers

    def create(self, pick: int, this: bool, that: bool) -> None:
        sandbox, attempt, args = self.pod(pick), int(this), ["x"] if that else []
        there = next(((m, vm) for m, vm in self.vms.items() if (vm.sandbox, vm.attempt) == (sandbox, attempt)), None)
        pod = self.pods.get(sandbox)
        if pod is None:
            expected = "NOT_FOUND"
        elif pod.state != READY:
            expected = "FAILED_PRECONDITION"
        elif there is not None:
            expected = "ok" if there[1].state == CREATED and there[1].args == args else "ALREADY_EXISTS"
        elif any(vm.state == RUNNING for vm in self.vms.values() if vm.sandbox == sandbox):
            expected = "FAILED_PRECONDITION"
        else:
            expected = "ok" if self.image else "NOT_FOUND"
        made = self.answer(expected, lambda: self.client.create(sandbox, "vm", attempt, args=args))
        if made is not None:
            assert there is None or made == there[0]
            self.vms.setdefault(made, Vm(sandbox, attempt, args))

    def start(self, pick: int, this: bool, that: bool) -> None:
        container = self.vm(pick)
        vm = self.vms.get(container)
        if vm is None:
            expected = "NOT_FOUND"
        elif (
            vm.state != CREATED
            or self.pods[vm.sandbox].state != READY
            or any(other.state == RUNNING for other in self.vms.values() if other.sandbox == vm.sandbox)
        ):
            expected = "FAILED_PRECONDITION"
        else:
            expected = "ok"
            vm.state = RUNNING
        self.answer(expected, lambda: self.client.start(container))

    def stop(self, pick: int, this: bool, that: bool) -> None:
        container, grace = self.vm(pick), 30 if this else 0
        self.client.stop(container, grace)
        vm = self.vms.get(container)
        if vm is not None and vm.state == RUNNING:
            # Here no guest has an agent: the system shuts down when asked, a command does not end and is killed.
            vm.state, vm.exit_code = EXITED, 143 if grace and not vm.args else 137

    def remove(self, pick: int, this: bool, that: bool) -> None:
        container = self.vm(pick)
        self.client.remove(container)
        if self.vms.pop(container, None):
            self.gone = container

    def status(self, pick: int, this: bool, that: bool) -> None:
        container = self.vm(pick)
        vm = self.vms.get(container)
        status = self.answer("ok" if vm else "NOT_FOUND", lambda: self.client.status(container[:20]))
        assert vm is None or (status.id, status.state, status.exit_code) == (container, vm.state, vm.exit_code)

    def reopen_container_log(self, pick: int, this: bool, that: bool) -> None:
        container = self.vm(pick)
        vm = self.vms.get(container)
        expected = "NOT_FOUND" if vm is None else "ok" if vm.state == RUNNING else "FAILED_PRECONDITION"
        request = pb.ReopenContainerLogRequest(container_id=container)
        self.answer(expected, lambda: self.client.ReopenContainerLog(request))

    # --- images

    def pull(self, pick: int, this: bool, that: bool) -> None:
        self.client.pull()
        self.image = True

    def remove_image(self, pick: int, this: bool, that: bool) -> None:
        self.client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=IMAGE)))
        self.image = False

    # --- what happens

    def guest_ends(self, pick: int, this: bool, that: bool) -> None:
        container = self.vm(pick)
        vm = self.vms.get(container)
        if vm is not None and vm.state == RUNNING:
            self.outside.vms.end(
                self.world.domain(ContainerId(container)), OffReason.CRASHED if this else OffReason.SHUTDOWN
            )
            self.outside.vms.deliver()
            vm.state, vm.exit_code = EXITED, 137 if this else 0

    def restart(self, pick: int, this: bool, that: bool) -> None:
        self.node.close()
        self.serve()


# Plain lists, every step as likely as its place here says: a state machine of hypothesis leaves most rules out of a run.
STEPS = [
    *(Node.run, Node.run, Node.create, Node.create, Node.create, Node.start, Node.start, Node.pull),
    *(Node.stop, Node.remove, Node.stop_pod, Node.remove_pod, Node.guest_ends, Node.restart, Node.remove_image),
    *(Node.status, Node.pod_status, Node.reopen_container_log),
]


@given(
    st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 11), st.booleans(), st.booleans()), min_size=30, max_size=60
    )
)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
def test_any_sequence_of_calls_agrees_with_the_model(steps: list[Any]) -> None:
    node = Node()
    try:
        for step, pick, this, that in steps:
            step(node, pick, this, that)
            node.check()
    finally:
        node.end()
