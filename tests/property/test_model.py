"""Any sequence of calls and restarts, over the wire, against a model: each answer and each list is what the model says."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from fakes.cri import served
from fakes.world import IMAGE, Outside
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.domain.ids import ContainerId
from virtshim.domain.vm import OffReason

READY, NOTREADY = pb.SANDBOX_READY, pb.SANDBOX_NOTREADY
CREATED, RUNNING, EXITED = pb.CONTAINER_CREATED, pb.CONTAINER_RUNNING, pb.CONTAINER_EXITED
MISSING = "f" * 64


@dataclass
class Pod:
    key: tuple[int, int]
    hostname: str
    state: int = READY


@dataclass
class Vm:
    sandbox: str
    key: tuple[str, int]
    args: list[str]
    state: int = CREATED
    exit_code: int = 0


class AgainstModel(RuleBasedStateMachine):
    """`pods` and `vms` are the model, by id and in order of creation."""

    sandboxes = Bundle("sandboxes")
    containers = Bundle("containers")

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="model-")
        self.outside = Outside()
        self.pods: dict[str, Pod] = {}
        self.vms: dict[str, Vm] = {}
        self.serve()
        self.world.pull()
        self.image = True

    def serve(self) -> None:
        self.node = contextlib.ExitStack()
        self.world, self.client, _ = self.node.enter_context(served(Path(self.directory), self.outside))

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        with self.node:
            for sandbox in self.pods:
                self.client.remove_pod(sandbox)
            self.client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=IMAGE)))
            assert self.world.everything() == self.world.leftovers() == []
        shutil.rmtree(self.directory)

    def answers(self, expected: str, call: Any) -> Any:
        """The answer; fails unless it is `ok` or the refusal that is expected."""
        try:
            answer = call()
        except grpc.RpcError as error:
            assert error.code().name == expected, error.details()
            return None
        assert expected == "ok"
        return answer

    # --- pods

    @rule(target=sandboxes, n=st.integers(0, 2), attempt=st.integers(0, 1), hostname=st.sampled_from(["a", "b"]))
    def run(self, n: int, attempt: int, hostname: str) -> Any:
        key = (n, attempt)
        there = next(((made, one) for made, one in self.pods.items() if one.key == key), None)
        expected = "ok"
        if there is not None and (there[1].hostname != hostname or there[1].state != READY):
            expected = "ALREADY_EXISTS"
        made = self.answers(expected, lambda: self.client.run(f"pod-{n}", attempt, hostname=hostname))
        if made is None:
            return multiple()
        if there is not None:
            assert made == there[0]
        self.pods.setdefault(made, Pod(key, hostname))
        return made

    @rule(sandbox=sandboxes)
    def stop_pod(self, sandbox: str) -> None:
        self.client.stop_pod(sandbox)
        if sandbox in self.pods:
            self.pods[sandbox].state = NOTREADY
        for vm in self.vms.values():
            if vm.sandbox == sandbox and vm.state == RUNNING:
                vm.state, vm.exit_code = EXITED, 137

    @rule(sandbox=sandboxes)
    def remove_pod(self, sandbox: str) -> None:
        self.client.remove_pod(sandbox)
        self.pods.pop(sandbox, None)
        self.vms = {made: vm for made, vm in self.vms.items() if vm.sandbox != sandbox}

    @rule(sandbox=sandboxes | st.just(MISSING))
    def pod_status(self, sandbox: str) -> None:
        status = self.answers(
            "ok" if sandbox in self.pods else "NOT_FOUND", lambda: self.client.pod_status(sandbox[:20])
        )
        assert status is None or (status.id, status.state) == (sandbox, self.pods[sandbox].state)

    # --- containers

    @rule(
        target=containers,
        sandbox=sandboxes | st.just(MISSING),
        name=st.sampled_from(["init", "vm"]),
        attempt=st.integers(0, 1),
        args=st.sampled_from([[], ["x"]]),
    )
    def create(self, sandbox: str, name: str, attempt: int, args: list[str]) -> Any:
        key = (name, attempt)
        there = next(((m, vm) for m, vm in self.vms.items() if (vm.sandbox, vm.key) == (sandbox, key)), None)
        pod = self.pods.get(sandbox)
        if pod is None:
            expected = "NOT_FOUND"
        elif pod.state != READY:
            expected = "FAILED_PRECONDITION"
        elif there is not None:
            expected = "ok" if there[1].state == CREATED and there[1].args == args else "ALREADY_EXISTS"
        else:
            expected = "ok" if self.image else "NOT_FOUND"
        made = self.answers(expected, lambda: self.client.create(sandbox, name, attempt, args=args))
        if made is None:
            return multiple()
        if there is not None:
            assert made == there[0]
        self.vms.setdefault(made, Vm(sandbox, key, args))
        return made

    @rule(container=containers | st.just(MISSING))
    def start(self, container: str) -> None:
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
        self.answers(expected, lambda: self.client.start(container))
        if vm is not None and expected == "ok":
            vm.state = RUNNING

    @rule(container=containers | st.just(MISSING), grace=st.sampled_from([0, 30]))
    def stop(self, container: str, grace: int) -> None:
        self.client.stop(container, grace)
        vm = self.vms.get(container)
        if vm is not None and vm.state == RUNNING:
            vm.state, vm.exit_code = EXITED, 0 if grace else 137

    @rule(container=containers | st.just(MISSING))
    def remove(self, container: str) -> None:
        self.client.remove(container)
        self.vms.pop(container, None)

    @rule(container=containers | st.just(MISSING))
    def status(self, container: str) -> None:
        vm = self.vms.get(container)
        status = self.answers("ok" if vm else "NOT_FOUND", lambda: self.client.status(container[:20]))
        assert status is None or vm is None or (status.id, status.exit_code) == (container, vm.exit_code)

    @rule(container=containers | st.just(MISSING))
    def reopen_log(self, container: str) -> None:
        vm = self.vms.get(container)
        expected = "NOT_FOUND" if vm is None else "ok" if vm.state == RUNNING else "FAILED_PRECONDITION"
        request = pb.ReopenContainerLogRequest(container_id=container)
        self.answers(expected, lambda: self.client.ReopenContainerLog(request))

    # --- images

    @rule()
    def pull(self) -> None:
        self.client.pull()
        self.image = True

    @rule()
    def remove_image(self) -> None:
        self.client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=IMAGE)))
        self.image = False

    # --- what happens

    @rule(container=containers, reason=st.sampled_from([(OffReason.SHUTDOWN, 0), (OffReason.CRASHED, 1)]))
    def guest_ends(self, container: str, reason: tuple[OffReason, int]) -> None:
        vm = self.vms.get(container)
        if vm is not None and vm.state == RUNNING:
            self.outside.vms.end(self.world.domain(ContainerId(container)), reason[0])
            self.outside.vms.deliver()
            vm.state, vm.exit_code = EXITED, reason[1]

    @rule()
    def restart(self) -> None:
        self.node.close()
        self.serve()

    # --- what always holds

    @invariant()
    def lists_are_what_the_model_says(self) -> None:
        if not hasattr(self, "node"):
            return
        assert [(item.id, item.state) for item in self.client.pods()] == [
            (made, pod.state) for made, pod in self.pods.items()
        ]
        assert [(item.id, item.state, item.pod_sandbox_id) for item in self.client.containers()] == [
            (made, vm.state, vm.sandbox) for made, vm in self.vms.items()
        ]
        assert len(self.client.ListImages(pb.ListImagesRequest()).images) == self.image

    @invariant()
    def nothing_is_there_that_no_record_knows(self) -> None:
        assert not hasattr(self, "node") or self.world.leftovers() == []


AgainstModel.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAgainstModel = AgainstModel.TestCase
