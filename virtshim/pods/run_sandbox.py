"""RunPodSandbox: makes record, network namespace, CNI network and IP. StartContainer boots the VM later."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from virtshim.annotations.beside_containers import refuse_alone
from virtshim.annotations.parse import parse_vm_options
from virtshim.annotations.profiles import Profile, of_pod
from virtshim.metrics import observed
from virtshim.metrics.start_ups import StartUps
from virtshim.model.deadline import Deadline
from virtshim.model.errors import AlreadyExists
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import (
    PodKey,
    Sandbox,
    SandboxConfig,
    SandboxPhase,
    check_handler,
    pod_hash,
    refuse_without_overhead,
    vm_name,
)
from virtshim.model.sizing import may_want_queues
from virtshim.moves.ports import SavedVms, StateVolumes
from virtshim.moves.receiving import ReceiveVm
from virtshim.pods.earlier import disk_bus, known_nics, root_disks
from virtshim.pods.ports import AttachRequest, PodNetworks
from virtshim.store.ports import Records
from virtshim.system.clock import Clock, Stamps
from virtshim.system.live import Live
from virtshim.system.locks import Inflight, PodLocks
from virtshim.system.rollback import Rollback

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunSandbox:
    """`timeout`: seconds for the clean-up of a failed call, whatever the caller's deadline is. `require_overhead`:
    refuse pods whose RuntimeClass has no memory overhead. `pod_handlers`: of pods whose sandbox another runtime makes."""

    records: Records
    networks: PodNetworks
    clock: Clock
    stamps: Stamps
    locks: PodLocks
    inflight: Inflight[SandboxId]
    handlers: frozenset[str]
    pod_handlers: frozenset[str]
    profiles: Live[Sequence[Profile]]
    require_overhead: Live[bool]
    timeout: float
    start_ups: StartUps
    vms: SavedVms
    state_volumes: StateVolumes
    receiving: ReceiveVm

    def run(self, key: PodKey, config: SandboxConfig, deadline: Deadline) -> SandboxId:
        """Returns the id of a READY sandbox. A repeat of a finished call returns the first id. The same name with a
        different config raises AlreadyExists."""
        check_handler(config.runtime_handler, self.handlers, self.pod_handlers)
        if self.require_overhead.now:
            refuse_without_overhead(config)
        profile = of_pod(self.profiles.now, config.annotations, config.runtime_handler)
        # Bad annotations fail here, because the pod's events show this call's errors first.
        refuse_alone(parse_vm_options({**profile, **config.annotations}))
        left = deadline.left(self.clock.monotonic())
        return self.inflight.run(key, config, lambda: self._run(key, config, profile, deadline), timeout=left)

    def _run(self, key: PodKey, config: SandboxConfig, profile: Mapping[str, str], deadline: Deadline) -> SandboxId:
        for other in self.records.sandboxes.all():
            if other.key == key:
                if other.phase is SandboxPhase.CREATING:  # its undo failed; only this call may use the key
                    self.networks.release(other.id, self.timeout)
                    self.records.sandboxes.delete(other.id)
                    continue
                if other.phase is SandboxPhase.READY and other.config == config:
                    return other.id
                raise AlreadyExists(
                    f"a sandbox for pod {key} already exists: {other.id} ({other.phase.value}); remove it first"
                )
        deadline.check(self.clock.monotonic(), "the pod network was requested")
        own = SandboxId(secrets.token_hex(32))
        with self.locks.held(own), self.start_ups.phase("sandbox", own):
            with self.locks.held_for_all(pod_hash(key)):  # from now on the record reserves the pod's disks
                sandbox = self._recorded(own, key, config, profile)
            return self._make(sandbox, deadline)

    def _recorded(self, own: SandboxId, key: PodKey, config: SandboxConfig, profile: Mapping[str, str]) -> Sandbox:
        sandbox = Sandbox(
            id=own,
            key=key,
            config=config,
            created_at=self.stamps.next(),
            root_disks=root_disks(self.records, key),
            disk_bus=disk_bus(self.records, key),
            profile=profile,
        )
        # CREATING is not synced, READY is: after a power cut kubelet asks again, and a network without a record is
        # released.
        self.records.sandboxes.add(sandbox, survives_power_cuts=False)
        return sandbox

    def _make(self, sandbox: Sandbox, deadline: Deadline) -> SandboxId:
        """A failure leaves nothing behind, unless undo fails too: then the row becomes NOT_READY, so that kubelet's
        StopPodSandbox and RemovePodSandbox finish the clean-up."""
        with Rollback() as undo:
            undo.add("record", lambda: self._forget(sandbox, undo))
            undo.add("network", lambda: self.networks.release(sandbox.id, self.timeout))
            config = sandbox.config
            options = parse_vm_options(sandbox.vm_annotations)
            vm = vm_name(options.vm, sandbox.key)
            macs, addresses = known_nics(self.vms, sandbox.key, vm)
            if options.state_volume:  # the guest has these MACs on every node
                self.state_volumes.check()
                macs = {**macs, **self.state_volumes.macs(sandbox.key.namespace, vm)}
            if options.restore_from:
                macs = {**macs, **self.receiving.macs(sandbox.key, vm, options.restore_from)}
            ask = AttachRequest(
                sandbox=sandbox.id,
                pod=sandbox.key,
                dns=config.dns,
                port_mappings=config.port_mappings,
                hostname=config.hostname,
                filter=options.network_filter,
                bandwidth=options.bandwidth,
                multi_queue=may_want_queues(options, config.resources),
                macs=macs,
                addresses=addresses,
            )
            with self.start_ups.step(observed.Step.NETWORK, sandbox.id):
                network = self.networks.attach(ask, timeout=deadline.left(self.clock.monotonic()))
            self.records.sandboxes.replace(sandbox.ready(network))
            undo.commit()
        log.info("sandbox.ready", sandbox=sandbox.id.short, pod=str(sandbox.key), ips=network.ips)
        return sandbox.id

    def _forget(self, sandbox: Sandbox, undo: Rollback) -> None:
        if undo.clean:
            self.records.sandboxes.delete(sandbox.id)
        else:
            self.records.sandboxes.replace(sandbox.not_ready("its set-up failed and could not be undone"))
