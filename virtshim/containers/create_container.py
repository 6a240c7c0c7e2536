"""CreateContainer: makes record, disk, seed and libvirt definition, one step after another. The VM does not run yet."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from virtshim.containers.admission import Admission
from virtshim.containers.creation_steps import Draft, Step
from virtshim.containers.new_record import ContainerRecords
from virtshim.devices.claims import NotYetFree
from virtshim.guest.command import termination_file
from virtshim.metrics import observed
from virtshim.metrics.start_ups import StartUps
from virtshim.model.container import Container, ContainerConfig, ContainerName, ContainerPhase
from virtshim.model.deadline import Deadline
from virtshim.model.errors import AlreadyExists
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sizing import sized_by
from virtshim.store.ports import Records
from virtshim.system.clock import Clock
from virtshim.system.locks import Inflight, PodLocks
from virtshim.system.rollback import Rollback

# What identifies a repeated CreateContainer. Pure.


def comparable(config: ContainerConfig) -> ContainerConfig:
    """The config without the parts that kubelet changes in each repeat: the path of the termination message's file is
    random, and variables and devices come from maps, in random order."""
    file = termination_file(config.annotations, config.mounts)
    mounts = config.mounts
    if file is not None:
        mounts = tuple(dataclasses.replace(one, host_path="") if one.host_path == file.host else one for one in mounts)
    return dataclasses.replace(
        config,
        mounts=mounts,
        envs=tuple(sorted(config.envs)),
        devices=tuple(sorted(config.devices, key=lambda one: (one.container_path, one.host_path, one.permissions))),
        cdi=tuple(sorted(config.cdi)),
    )


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CreateContainer:
    records: Records
    clock: Clock
    locks: PodLocks
    inflight: Inflight[ContainerId]
    admission: Admission
    new_records: ContainerRecords
    # The steps that make a VM, in order.
    steps: Sequence[Step]
    start_ups: StartUps

    def create(
        self, sandbox_id: SandboxId, name: ContainerName, config: ContainerConfig, deadline: Deadline
    ) -> ContainerId:
        """Returns the id of a CREATED container. A repeat returns the id of the first call. The same name with a
        different config raises AlreadyExists."""
        key = f"container {name} in sandbox {sandbox_id}"
        left = deadline.left(self.clock.monotonic())
        what = comparable(config)
        return self.inflight.run(key, what, lambda: self._create(sandbox_id, name, config, deadline), timeout=left)

    def _create(
        self, sandbox_id: SandboxId, name: ContainerName, config: ContainerConfig, deadline: Deadline
    ) -> ContainerId:
        """Waits for devices that are still being reset: kubelet grants a device again as soon as its container has
        ended."""
        while True:
            try:
                return self._create_now(sandbox_id, name, config, deadline)
            except NotYetFree as held:
                self.admission.claims.await_free(held, deadline.left(self.clock.monotonic()))

    def _create_now(
        self, sandbox_id: SandboxId, name: ContainerName, config: ContainerConfig, deadline: Deadline
    ) -> ContainerId:
        with self.locks.held_while_waiting(sandbox_id) as leave_off:
            sandbox = self.admission.ready_sandbox(sandbox_id)
            earlier = self._earlier(sandbox_id, name, config)
            if earlier is not None:
                return earlier
            with observed.step(observed.Step.ADMISSION):
                admitted = self.admission.admit(sandbox, name, config)
            deadline.check(self.clock.monotonic(), "the container was created")
            with leave_off.explained(f"its pod is being stopped, so container {name} is not created"):
                draft = self.new_records.add(admitted, leave_off)
            with self.start_ups.phase("create", sandbox_id, draft.container.id):
                self._make(draft)
            vcpus, memory = sized_by(admitted.options, config.resources)
            log.info(
                "container.sized",
                container=draft.container.id.short,
                vcpus=admitted.size.vcpus,
                vcpus_by=vcpus,
                memory=admitted.size.memory_bytes,
                memory_by=memory,
            )
            return draft.container.id

    def _earlier(self, sandbox: SandboxId, name: ContainerName, config: ContainerConfig) -> ContainerId | None:
        for other in self.records.containers.all():
            if other.sandbox_id == sandbox and other.name == name:
                if other.was_never_created:
                    # Nobody creates it now, because this call holds the pod's lock: its rollback failed.
                    self._drop(other)
                    continue
                if other.phase is ContainerPhase.CREATED and comparable(other.config) == comparable(config):
                    return other.id
                raise AlreadyExists(
                    f"container {name} already exists in sandbox {sandbox}: {other.id} ({other.phase.value}); "
                    "remove it first"
                )
        return None

    def _make(self, draft: Draft) -> None:
        container = draft.container
        with Rollback() as undo:
            undo.add("record", lambda: self.new_records.forget(container, clean=undo.clean))
            for step in self.steps:
                undo.add(type(step).__name__, functools.partial(step.undo, container))
                with self.start_ups.step(step.measured_as, container.sandbox_id, container.id):
                    draft = step.make(draft)
            self.records.containers.replace(container.created())
            undo.commit()
        image = str(draft.image.id)[:19]
        log.info("container.created", container=container.id.short, sandbox=container.sandbox_id.short, image=image)

    def _drop(self, container: Container) -> None:
        for step in reversed(self.steps):
            step.undo(container)
        self.new_records.forget(container, clean=True)
