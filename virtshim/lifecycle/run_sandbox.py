"""RunPodSandbox: record, network namespace, CNI, IP. The VM itself comes with StartContainer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from virtshim.domain.annotations.parse import parse_vm_options
from virtshim.domain.deadline import Deadline
from virtshim.domain.errors import AlreadyExists
from virtshim.domain.ids import ImageDigest, SandboxId
from virtshim.domain.sandbox import PodKey, Sandbox, SandboxConfig, SandboxPhase, check_handler
from virtshim.domain.vm import DiskBus
from virtshim.ports.clock import Clock
from virtshim.ports.network import AttachRequest, PodNetworks
from virtshim.ports.records import Records
from virtshim.primitives.clock import Stamps
from virtshim.primitives.inflight import Inflight
from virtshim.primitives.pod_locks import PodLocks
from virtshim.primitives.rollback import Rollback

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunSandbox:
    """`timeout`: seconds that clean-up of a failed call may take; it never uses the caller's own deadline."""

    records: Records
    networks: PodNetworks
    clock: Clock
    stamps: Stamps
    locks: PodLocks
    inflight: Inflight[SandboxId]
    handlers: frozenset[str]
    timeout: float

    def run(self, key: PodKey, config: SandboxConfig, deadline: Deadline) -> SandboxId:
        """Returns the id of a READY sandbox. A repeat of a finished call returns the first's id; the same name with
        something different is AlreadyExists."""
        check_handler(config.runtime_handler, self.handlers)
        parse_vm_options(config.annotations)  # a bad annotation fails here, where the pod's events show it first
        left = deadline.left(self.clock.monotonic())
        return self.inflight.run(key, config, lambda: self._run(key, config, deadline), timeout=left)

    def _run(self, key: PodKey, config: SandboxConfig, deadline: Deadline) -> SandboxId:
        for other in self.records.sandboxes.all():
            if other.key == key:
                if other.phase is SandboxPhase.CREATING:  # nobody makes it: the key is ours now. Its undo failed
                    self.networks.release(other.id, self.timeout)
                    self.records.sandboxes.delete(other.id)
                    continue
                if other.phase is SandboxPhase.READY and other.config == config:
                    return other.id
                raise AlreadyExists(
                    f"a sandbox for pod {key} already exists: {other.id} ({other.phase.value}); remove it first"
                )
        deadline.check(self.clock.monotonic(), "the pod network was requested")
        sandbox = Sandbox(
            id=SandboxId(secrets.token_hex(32)),
            key=key,
            config=config,
            created_at=self.stamps.next(),
            root_disks=self._root_disks(key),
            disk_bus=self._disk_bus(key),
            sole_container=self._sole_container(key),
        )
        with self.locks.held(sandbox.id):
            return self._make(sandbox, deadline)

    def _root_disks(self, pod: PodKey) -> Mapping[str, ImageDigest]:
        """Those that the pod's earlier sandboxes made."""
        found: dict[str, ImageDigest] = {}
        for earlier in self.records.sandboxes.all():  # in order of creation: the newest one knows best
            if earlier.key.is_same_pod(pod):
                found.update(earlier.root_disks)
        return found

    def _disk_bus(self, pod: PodKey) -> DiskBus:
        """That of the pod's first sandbox: a disk that the pod keeps is the one its guest knows."""
        earlier = [other.disk_bus for other in self.records.sandboxes.all() if other.key.is_same_pod(pod)]
        return earlier[0] if earlier else DiskBus.VIRTIO

    def _sole_container(self, pod: PodKey) -> str:
        """What is sure of the pod stays so in its next sandbox, in which kubelet begins with whatever has not succeeded."""
        known = [other.sole_container for other in self.records.sandboxes.all() if other.key.is_same_pod(pod)]
        return next(filter(None, known), "")

    def _make(self, sandbox: Sandbox, deadline: Deadline) -> SandboxId:
        """On failure nothing is left, unless undo fails too: then the row stays NOT_READY, so that kubelet's own
        StopPodSandbox and RemovePodSandbox finish the job."""
        with Rollback() as undo:
            self.records.sandboxes.add(sandbox)
            undo.add("record", lambda: self._forget(sandbox, undo))
            undo.add("network", lambda: self.networks.release(sandbox.id, self.timeout))
            config = sandbox.config
            network = self.networks.attach(
                AttachRequest(sandbox.id, sandbox.key, config.dns, config.port_mappings, config.hostname),
                timeout=deadline.left(self.clock.monotonic()),
            )
            self.records.sandboxes.replace(sandbox.ready(network))
            undo.commit()
        log.info("sandbox.ready", sandbox=sandbox.id.short, pod=str(sandbox.key), ips=network.ips)
        return sandbox.id

    def _forget(self, sandbox: Sandbox, undo: Rollback) -> None:
        if undo.clean:
            self.records.sandboxes.delete(sandbox.id)
        else:
            self.records.sandboxes.replace(sandbox.not_ready("its set-up failed and could not be undone"))
