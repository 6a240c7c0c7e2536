"""Adopt: attaches the VMs of a pod to a sandbox that another runtime made and keeps. `virtshim proxy` calls it before each
CreateContainer of a VM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from virtshim.annotations.beside_containers import guest_ports, refuse_beside_containers
from virtshim.annotations.parse import parse_vm_options
from virtshim.annotations.profiles import Profile, of_pod
from virtshim.metrics import observed
from virtshim.metrics.start_ups import StartUps
from virtshim.model.deadline import Deadline
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.ids import SandboxId
from virtshim.model.network import PodNetwork
from virtshim.model.sandbox import (
    Adoption,
    NamespaceScope,
    PodKey,
    Sandbox,
    SandboxConfig,
    SandboxPhase,
    pod_hash,
    refuse_without_overhead,
    vm_name,
)
from virtshim.moves.ports import SavedVms
from virtshim.pods.earlier import disk_bus, known_nics, root_disks
from virtshim.pods.ports import AttachRequest, PodNetworks
from virtshim.store.ports import Records
from virtshim.system.clock import Clock, Stamps
from virtshim.system.live import Live
from virtshim.system.locks import PodLocks
from virtshim.system.rollback import Rollback
from virtshim.volumes import memory_volumes
from virtshim.volumes.ports import VmShares

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AdoptSandbox:
    """`timeout`: seconds for the clean-up of a failed call, whatever the caller's deadline is. `pod_handlers`: of pods whose
    sandbox another runtime makes."""

    records: Records
    networks: PodNetworks
    shares: VmShares
    clock: Clock
    stamps: Stamps
    locks: PodLocks
    pod_handlers: frozenset[str]
    profiles: Live[Sequence[Profile]]
    timeout: float
    start_ups: StartUps
    vms: SavedVms

    def check(self, config: SandboxConfig, deadline: Deadline) -> None:
        """Raises what `adopt` would raise for such a pod, as far as it can be known before the sandbox exists. The pod's events
        show errors of RunPodSandbox first."""
        self._refuse_unfit(config)
        left = deadline.left(self.clock.monotonic())
        self.networks.attached(left)
        self.shares.check_passt(left)

    def adopt(self, own: SandboxId, key: PodKey, config: SandboxConfig, to: Adoption, deadline: Deadline) -> None:
        """Returns when the sandbox is READY here. A repeated call does nothing. What the first call said of the pod stays, as
        with RunPodSandbox. The pod's earlier sandboxes stay until they are removed."""
        with self.locks.held(own):
            deadline.check(self.clock.monotonic(), "the sandbox was adopted")
            before = self.records.sandboxes.get(own)
            if before is None or before.phase is SandboxPhase.CREATING:  # its undo failed
                sandbox = self._recorded(own, key, config, to)
                with self.start_ups.phase("sandbox", own):
                    self._make(sandbox, deadline)
                return
            self._refuse_another(before, key, to)
            if not before.is_ready:
                with self.start_ups.phase("sandbox", own):
                    self._adopt_again(before, deadline)

    def _refuse_unfit(self, config: SandboxConfig) -> Mapping[str, str]:
        """Returns the annotations of the pod's profile. Raises InvalidRequest."""
        if config.runtime_handler not in self.pod_handlers:
            known = ", ".join(sorted(self.pod_handlers)) or "none"
            raise InvalidRequest(
                f"runtime_handler {config.runtime_handler[:300]!r} is not one whose pods virtshim adopts (known: {known}); add "
                "it to pod_handlers in [[proxy.others]], or correct the RuntimeClass"
            )
        if config.namespaces.pid is NamespaceScope.POD:
            raise InvalidRequest(
                "config.linux.security_context.namespace_options.pid is POD: the processes of a guest are not in the pod's "
                "process namespace; remove shareProcessNamespace from the pod"
            )
        refuse_without_overhead(config, shared=True)
        profile = of_pod(self.profiles.now, config.annotations, config.runtime_handler)
        options = parse_vm_options({**profile, **config.annotations})
        if options.memory_volumes:
            raise InvalidRequest(
                f"annotation {memory_volumes.ANNOTATION}: the pod's containers would not see what the guest writes to a "
                "volume in its own memory; remove the annotation, and the volume is shared"
            )
        refuse_beside_containers(options)
        guest_ports(options, config.port_mappings)
        return profile

    def _refuse_another(self, before: Sandbox, key: PodKey, to: Adoption) -> None:
        if before.adopted is None or before.key != key:
            raise WrongState(f"sandbox {before.id} is known as another one, of pod {before.key}; remove it first")
        if before.adopted.netns != to.netns:
            raise WrongState(
                f"sandbox {before.id} is adopted with the network namespace {before.adopted.netns}, so it cannot be adopted with "
                f"{to.netns[:200]}; stop and remove the pod's sandbox"
            )

    def _recorded(self, own: SandboxId, key: PodKey, config: SandboxConfig, to: Adoption) -> Sandbox:
        profile = self._refuse_unfit(config)
        with self.locks.held_for_all(pod_hash(key)):  # from now on the record reserves the pod's disks
            if self.records.sandboxes.get(own) is not None:
                self.networks.release(own, self.timeout)
                self.records.sandboxes.delete(own)
            sandbox = Sandbox(
                id=own,
                key=key,
                config=config,
                created_at=self.stamps.next(),
                root_disks=root_disks(self.records, key),
                disk_bus=disk_bus(self.records, key),
                profile=profile,
                adopted=to,
            )
            # Not synced, as with RunPodSandbox: READY is.
            self.records.sandboxes.add(sandbox, survives_power_cuts=False)
        return sandbox

    def _make(self, sandbox: Sandbox, deadline: Deadline) -> None:
        with Rollback() as undo:
            undo.add("record", lambda: self._forget(sandbox, undo))
            undo.add("network", lambda: self.networks.release(sandbox.id, self.timeout))
            self.records.sandboxes.replace(sandbox.ready(self._attach(sandbox, deadline)))
            undo.commit()
        netns = sandbox.adopted.netns if sandbox.adopted else ""
        log.info("sandbox.adopted", sandbox=sandbox.id.short, pod=str(sandbox.key), netns=netns)

    def _adopt_again(self, before: Sandbox, deadline: Deadline) -> None:
        """Of a sandbox that tapmanager had lost, or that was stopped here alone. Its runtime still has it, and nobody but this
        call would repair it."""
        for container in self.records.containers.all():
            if container.sandbox_id == before.id and container.is_running:
                raise WrongState(
                    f"sandbox {before.id} is not ready ({before.reason or before.phase.value}), and container {container.id} "
                    "still runs in it; repeat the call when it has ended"
                )
        self.networks.release(before.id, self.timeout)
        self.records.sandboxes.replace(before.adopted_again(self._attach(before, deadline)))
        log.warning("sandbox.adopted_again", sandbox=before.id.short, pod=str(before.key), why=before.reason)

    def _attach(self, sandbox: Sandbox, deadline: Deadline) -> PodNetwork:
        config = sandbox.config
        vm = vm_name(parse_vm_options(sandbox.vm_annotations).vm, sandbox.key)
        macs = known_nics(self.vms, sandbox.key, vm)[0]
        if sandbox.network is not None:  # its VMs are defined with these
            macs = {**macs, **{nic.name: nic.mac for nic in sandbox.network.interfaces}}
        ask = AttachRequest(
            sandbox=sandbox.id,
            pod=sandbox.key,
            dns=config.dns,
            port_mappings=config.port_mappings,
            hostname=config.hostname,
            macs=macs,
            existing=sandbox.adopted,
        )
        with self.start_ups.step(observed.Step.NETWORK, sandbox.id):
            return self.networks.attach(ask, timeout=deadline.left(self.clock.monotonic()))

    def _forget(self, sandbox: Sandbox, undo: Rollback) -> None:
        if undo.clean:
            self.records.sandboxes.delete(sandbox.id)
        else:
            self.records.sandboxes.replace(sandbox.not_ready("its adoption failed and could not be undone"))
