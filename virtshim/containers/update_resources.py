"""UpdateContainerResources changes the VM; before it, UpdatePodSandboxResources tells kubelet whether the VM can
follow."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.annotations.parse import parse_vm_options
from virtshim.model.cgroup import VmCgroup
from virtshim.model.container import Container, ContainerPhase, Resources
from virtshim.model.errors import Aborted, InvalidRequest, NotFound, WrongState
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import Sandbox
from virtshim.model.sizing import NodeLimits, cgroup_of, merged, overhead_missing, refuse_little_overhead, resized
from virtshim.model.vm import VmSize
from virtshim.pods.lookup import existing_container, existing_sandbox
from virtshim.pods.ports import VmCgroups
from virtshim.store.ports import Records
from virtshim.system.live import Live
from virtshim.system.locks import PodLocks
from virtshim.system.rollback import Rollback
from virtshim.vm.ports import VmResizing

# UpdateContainerResources: changes everything or nothing, on a VM that is created or runs.

log = structlog.get_logger(__name__)

# How long a guest may take to give memory back, in seconds.
_BALLOON_LIMIT = 30.0
_RESIZABLE: Final = (ContainerPhase.CREATED, ContainerPhase.RUNNING)


@dataclass(frozen=True, slots=True)
class _Change:
    """One change: the container, its old values and its new ones."""

    container: Container
    domain: uuid.UUID
    resources: Resources
    size: VmSize
    before: VmCgroup
    after: VmCgroup
    # Set when the VM is to end.
    cancelled: threading.Event

    @property
    def runs(self) -> bool:
        return self.container.is_running


@dataclass(frozen=True, slots=True)
class UpdateContainerResources:
    """`timeout`: seconds for each call to tapmanager."""

    records: Records
    resizing: VmResizing
    cgroups: VmCgroups
    locks: PodLocks
    sizes: Live[NodeLimits]
    timeout: float

    def resize(self, wanted: Container, resources: Resources) -> None:
        """`resources`: what to change; 0 and "" leave a value alone. An error undoes everything except added vCPUs,
        because no guest can be forced to release one. Raises NotFound, WrongState, InvalidRequest, and Aborted if the
        VM is being stopped, since that does not wait for the guest to give memory back."""
        with self.locks.held_while_waiting(wanted.sandbox_id) as cancelled:
            container = existing_container(self.records, wanted.id)
            if container.phase not in _RESIZABLE:
                raise WrongState(
                    f"container {container.id} is {container.phase.value}: only a created or running one can be resized"
                )
            if container.unusable:
                raise Aborted(f"container {container.id} {container.unusable}")
            self._finish(container, cancelled)
            container = existing_container(self.records, wanted.id)
            if merged(container.resources, resources) != container.resources:
                self._apply(self._change(container, resources, cancelled))

    def finish_leftover(self, wanted: Container) -> None:
        """Completes or undoes a change that another process or a failed undo left unfinished. Raises the errors of
        `resize`."""
        with self.locks.held_while_waiting(wanted.sandbox_id) as cancelled:
            container = self.records.containers.get(wanted.id)
            if container is not None and container.phase in _RESIZABLE and not container.unusable:
                self._finish(container, cancelled)

    def _finish(self, container: Container, cancelled: threading.Event) -> None:
        if container.status.resizing is None:
            return
        try:
            change = self._change(container, container.status.resizing, cancelled)
        except InvalidRequest as exc:  # the node's settings have changed; the next change must not wait for this one
            log.warning("container.resize.given_up", container=container.id.short, why=str(exc))
            self._forget(container)
        else:
            self._apply(change)

    def _change(self, container: Container, resources: Resources, cancelled: threading.Event) -> _Change:
        """Plans the change and changes nothing yet. Raises the errors of `resize`."""
        sandbox = self.records.sandboxes.get(container.sandbox_id)
        if sandbox is None:
            raise NotFound(f"the sandbox of container {container.id} is gone")
        sizes = self.sizes.now
        after = merged(container.resources, resources)
        size = resized(container.status.size, parse_vm_options(sandbox.vm_annotations), after, sizes)
        missing = overhead_missing(sandbox, container.resources, container.status.size)
        refuse_little_overhead(sandbox, after, size, missing=missing)
        if size.memory_bytes != container.status.size.memory_bytes and container.granted.pins_memory:
            raise WrongState(
                "resources.limits.memory: the memory of a virtual machine with host devices cannot change while it runs, "
                "because the devices access it directly; restart the pod with another limit"
            )
        if container.status.warm_started and size.memory_bytes < container.status.size.memory_bytes:
            raise WrongState(
                "resources.limits.memory: the memory of a guest that came from a template (virtshim.io/warm-start) cannot shrink "
                "while it runs, because QEMU cannot give a part of the template back; restart the pod with another limit"
            )
        return _Change(
            container=container,
            domain=container.domain_uuid,
            resources=after,
            size=size,
            before=cgroup_of(container, sandbox, container.resources, container.status.size, sizes),
            after=cgroup_of(container, sandbox, after, size, sizes),
            cancelled=cancelled,
        )

    def _apply(self, change: _Change) -> None:
        container, old, new = change.container, change.container.status.size, change.size
        with Rollback() as undo:
            self.records.containers.replace(_resizing(container, change.resources))
            undo.add("record", lambda: self._forget(container) if undo.clean else None)
            if new.memory_bytes < old.memory_bytes:  # the guest gives it back before the cgroup shrinks
                self._shrink(change, undo)
                self._limit(change, undo)
            else:
                self._limit(change, undo)
                if new.memory_bytes > old.memory_bytes:
                    self._set_memory(change, undo)
            undo.add("libvirt's limits", lambda: self.resizing.set_limits(change.domain, change.before.limits))
            self.resizing.set_limits(change.domain, change.after.limits)
            if new.vcpus > old.vcpus:
                self.resizing.add_vcpus(change.domain, new.vcpus)
            self.records.containers.replace(container.resized(change.resources, new))
            undo.commit()
        log.info("container.resized", container=container.id.short, vcpus=new.vcpus, memory=new.memory_bytes)

    def _forget(self, container: Container) -> None:
        self.records.containers.replace(_resizing(container, None))

    def _limit(self, change: _Change, undo: Rollback) -> None:
        """A created container has no cgroup yet; StartContainer makes it with the new values."""
        if change.runs:
            self.cgroups.limit(change.after, self.timeout)
            undo.add("cgroup", lambda: self.cgroups.limit(change.before, self.timeout))

    def _shrink(self, change: _Change, undo: Rollback) -> None:
        if change.runs:
            used = self.resizing.memory_in_use(change.domain, change.cancelled)
            if used is None:
                raise WrongState(
                    "resources.limits.memory: the guest does not report how much memory it uses (it hangs, or has no virtio "
                    "balloon driver), so its memory cannot be reduced; restart the pod with less"
                )
            if used > change.size.memory_bytes:
                raise WrongState(
                    f"resources.limits.memory: the guest uses {used} bytes, so its memory cannot be reduced to "
                    f"{change.size.memory_bytes}; free some in the guest"
                )
        self._set_memory(change, undo)

    def _set_memory(self, change: _Change, undo: Rollback) -> None:
        before = change.container.status.size.memory_bytes

        def set_to(memory_bytes: int) -> None:
            self.resizing.set_memory(change.domain, memory_bytes, _BALLOON_LIMIT, change.cancelled)

        undo.add("memory", lambda: set_to(before))
        set_to(change.size.memory_bytes)


def _resizing(container: Container, target: Resources | None) -> Container:
    return dataclasses.replace(container, status=dataclasses.replace(container.status, resizing=target))


@dataclass(frozen=True, slots=True)
class UpdateSandboxResources:
    records: Records
    locks: PodLocks
    sizes: Live[NodeLimits]

    def resize(self, sandbox_id: SandboxId, overhead: Resources, resources: Resources) -> None:
        """Records the pod's new totals; UpdateContainerResources follows and changes the VM. Raises NotFound,
        WrongState if the VM could not follow, and InvalidRequest if its overhead would be too small. kubelet then
        leaves the pod as it is."""
        with self.locks.held(sandbox_id):
            sandbox = existing_sandbox(self.records, sandbox_id)
            # -1: kubelet read that the pod's cgroup has no limit, though a part of its resources may have one.
            resources = dataclasses.replace(resources, cpu_quota=max(resources.cpu_quota, 0))
            changed = sandbox.resized(merged(sandbox.overhead, overhead), merged(sandbox.resources, resources))
            for container in self.records.containers.all():
                if container.sandbox_id == sandbox_id and container.is_running:
                    self._refuse_what_the_vm_cannot(sandbox, container, changed)
            self.records.sandboxes.replace(changed)

    def _refuse_what_the_vm_cannot(self, sandbox: Sandbox, container: Container, changed: Sandbox) -> None:
        """Compares only those of the pod's values that equal the values of its one container. If they differ (limits of
        the pod itself), or if containers beside the VM may have values, UpdateContainerResources alone decides."""
        before, own, after = sandbox.resources, container.resources, changed.resources
        is_alone = sandbox.adopted is None
        future = Resources(
            cpu_quota=after.cpu_quota if is_alone and before.cpu_quota == own.cpu_quota else 0,
            cpu_period=after.cpu_period,
            memory_limit_bytes=(
                after.memory_limit_bytes if is_alone and before.memory_limit_bytes == own.memory_limit_bytes else 0
            ),
        )
        has, wanted = container.status.size, merged(own, future)
        size = resized(has, parse_vm_options(sandbox.vm_annotations), wanted, self.sizes.now)
        refuse_little_overhead(changed, wanted, size, missing=overhead_missing(sandbox, own, has))
