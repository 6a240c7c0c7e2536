"""Rebuilds records of existing virtual machines, from the copies beside their disks and from their definitions: after
the state database was lost, and for single records that cannot be read. Adds and replaces records, and touches nothing
else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from virtshim.model.container import Container, ContainerConfig, ContainerName, ContainerPhase, ContainerSpec
from virtshim.model.errors import InternalError, ShimError
from virtshim.model.image import UNKNOWN_IMAGE
from virtshim.model.sandbox import Adoption, PodKey, Sandbox, SandboxConfig, SandboxPhase, vm_uuid
from virtshim.model.vm import OwnedDomain
from virtshim.moves.ports import SavedVms
from virtshim.pods.ports import AttachRequest
from virtshim.store.ports import DomainMetadata, KnownNetworks, RecordCopies, StateRecords, VmInventory

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Rebuild:
    """`timeout`: seconds for a call to tapmanager."""

    records: StateRecords
    inventory: VmInventory
    copies: RecordCopies
    networks: KnownNetworks
    vms: SavedVms
    timeout: float

    def run(self, domains: Sequence[OwnedDomain], *, lost: bool) -> None:
        """`lost`: whether the database was lost, so that a VM without a record had one. A failure is logged."""
        for domain in domains:
            if self._wants_container(domain, lost=lost) or domain.sandbox_id.value in self.records.unreadable():
                try:
                    self._restore(domain, lost=lost)
                except ShimError as exc:
                    log.warning("rebuild.failed", vm=domain.name, container=domain.container_id.short, error=str(exc))

    def _wants_container(self, domain: OwnedDomain, *, lost: bool) -> bool:
        there = self.records.containers.get(domain.container_id)
        return lost if there is None else there.phase is ContainerPhase.UNKNOWN

    def _restore(self, domain: OwnedDomain, *, lost: bool) -> None:
        domain_metadata = self.inventory.domain_metadata(domain.uuid)
        try:
            sandbox, container = self._read(domain, domain_metadata)
        except InternalError as exc:
            log.warning("rebuild.bare", vm=domain.name, container=domain.container_id.short, why=str(exc))
            sandbox, container = self._bare(domain, domain_metadata)
        if self.records.sandboxes.get(sandbox.id) is None or sandbox.id.value in self.records.unreadable():
            self.records.sandboxes.put(sandbox)
        if self._wants_container(domain, lost=lost):
            self.records.containers.put(self._with_claims(domain, container))
        log.warning(
            "rebuild.done",
            container=container.id.short,
            sandbox=sandbox.id.short,
            pod=str(sandbox.key),
            phase=container.phase.value,
            lost="environment, times, what was resized",
        )

    def _with_claims(self, domain: OwnedDomain, container: Container) -> Container:
        """A running VM has the devices of its definition and those that its record claimed. Others' devices may belong
        to somebody else by now."""
        before = self.records.containers.get(container.id)
        held = (*container.granted.claims, *(before.claims if before else ()))
        return container.with_claims(tuple(dict.fromkeys(held)) if domain.state.is_on else ())

    def _read(self, domain: OwnedDomain, domain_metadata: DomainMetadata) -> tuple[Sandbox, Container]:
        """The records in the copy. Raises InternalError."""
        text = self.copies.read(domain.container_id)
        if not text:
            raise InternalError("there is no copy of its records beside its disk")
        sandbox, container = self.records.from_text(text)
        if (sandbox.id, container.id) != (domain.sandbox_id, domain.container_id):
            raise InternalError("the copy of its records describes a different container than its owner mark")
        network = sandbox.network and dataclasses.replace(sandbox.network, fetch_key=domain_metadata.fetch_key)
        # The steps after this one check whether the network still exists, as after each start.
        phase = SandboxPhase.READY if network else SandboxPhase.NOT_READY
        spec = dataclasses.replace(container.spec, domain_uuid=str(domain.uuid))
        return (
            dataclasses.replace(sandbox, network=network, phase=phase),
            _alive(domain, domain_metadata, Container(spec, container.status)),
        )

    def _bare(self, domain: OwnedDomain, domain_metadata: DomainMetadata) -> tuple[Sandbox, Container]:
        """Names and ids only, enough for the VM to be seen, stopped and removed."""
        namespace, pod, name = ([*domain_metadata.title.split("/"), "", "", ""])[:3]
        known = self.networks.pod_of(domain.sandbox_id, self.timeout)
        key = known or PodKey(namespace, pod, "", 0)
        labels = {
            "io.kubernetes.pod.namespace": key.namespace,
            "io.kubernetes.pod.name": key.name,
            "io.kubernetes.pod.uid": key.uid,
        }
        sandbox = Sandbox(id=domain.sandbox_id, key=key, config=SandboxConfig(labels=labels), created_at=1)
        if known:  # the network exists, and a repeated attach returns it
            network = self.networks.attach(AttachRequest(sandbox.id, key, sandbox.config.dns), self.timeout)
            if sandbox.id.short not in network.netns:  # tapmanager names its own namespaces after the sandbox
                sandbox = dataclasses.replace(sandbox, adopted=Adoption(network.netns, network.ips))
            sandbox = sandbox.ready(network)
        else:
            sandbox = sandbox.not_ready("the state database was lost, and its network with it")
        # The disk of a VM that outlives its pods must not be deleted with this container.
        vm = next((one for one in self.vms.all() if vm_uuid(one.disk) == domain.uuid), None)
        spec = ContainerSpec(
            id=domain.container_id,
            sandbox_id=domain.sandbox_id,
            name=ContainerName(name, 0),
            config=ContainerConfig(image="", labels={**labels, "io.kubernetes.container.name": name}),
            image=vm.image if vm is not None else UNKNOWN_IMAGE,
            image_ref="",
            pod_disk=vm.disk if vm is not None else "",
            vm=vm.name if vm is not None else "",
            domain_uuid=str(domain.uuid),
            created_at=1,
            uid=domain_metadata.uid,
        )
        return sandbox, _alive(domain, domain_metadata, Container(spec))


def _alive(domain: OwnedDomain, domain_metadata: DomainMetadata, container: Container) -> Container:
    """RUNNING for a container that ran, whether or not it still does: the steps after this one find out how it
    ended."""
    if domain.state.is_on or domain_metadata.has_run:
        status = dataclasses.replace(container.status, phase=ContainerPhase.RUNNING, started_at=container.created_at)
    else:
        status = dataclasses.replace(container.status, phase=ContainerPhase.CREATED)
    return Container(container.spec, status)
