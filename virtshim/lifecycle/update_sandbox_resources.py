"""UpdatePodSandboxResources: kubelet asks before it changes the pod's own cgroup whether the VM could follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from virtshim.domain.annotations.parse import parse_vm_options
from virtshim.domain.container import Container, Resources
from virtshim.domain.ids import SandboxId
from virtshim.domain.sandbox import Sandbox
from virtshim.domain.sizing import NodeLimits, merged, overhead_missing, refuse_little_overhead, resized
from virtshim.ports.records import Records
from virtshim.primitives.existing import existing_sandbox
from virtshim.primitives.live import Live
from virtshim.primitives.pod_locks import PodLocks


@dataclass(frozen=True, slots=True)
class UpdateSandboxResources:
    records: Records
    locks: PodLocks
    sizes: Live[NodeLimits]

    def resize(self, sandbox_id: SandboxId, overhead: Resources, resources: Resources) -> None:
        """Records the pod's new sums; the VM itself changes with UpdateContainerResources, which follows. WrongState if it
        could not, InvalidRequest if its overhead is too small for that: kubelet then leaves the pod as it is. Raises NotFound."""
        with self.locks.held(sandbox_id):
            sandbox = existing_sandbox(self.records, sandbox_id)
            # -1: kubelet has read that the pod's cgroup has no limit, which a part of its resources may still have.
            resources = dataclasses.replace(resources, cpu_quota=max(resources.cpu_quota, 0))
            changed = sandbox.resized(merged(sandbox.overhead, overhead), merged(sandbox.resources, resources))
            for container in self.records.containers.all():
                if container.sandbox_id == sandbox_id and container.is_running:
                    self._refuse_what_the_vm_cannot(sandbox, container, changed)
            self.records.sandboxes.replace(changed)

    def _refuse_what_the_vm_cannot(self, sandbox: Sandbox, container: Container, changed: Sandbox) -> None:
        """The pod's numbers are the VM's as long as they are those of its one container; where they are not (several
        containers, limits of the pod itself), UpdateContainerResources decides alone."""
        before, own, after = sandbox.resources, container.resources, changed.resources
        future = Resources(
            cpu_quota=after.cpu_quota if before.cpu_quota == own.cpu_quota else 0,
            cpu_period=after.cpu_period,
            memory_limit_bytes=after.memory_limit_bytes if before.memory_limit_bytes == own.memory_limit_bytes else 0,
        )
        has, wanted = container.status.size, merged(own, future)
        size = resized(has, parse_vm_options(sandbox.vm_annotations), wanted, self.sizes.now)
        refuse_little_overhead(changed, wanted, size, missing=overhead_missing(sandbox, own, has))
