"""Step: what tells the guest at its first boot who it is: the cloud-init seed ISO, what Ignition or Windows' setup
looks for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import structlog

from virtshim.domain.container import Container
from virtshim.domain.devices import guest_view
from virtshim.domain.network import Dns, nics_of
from virtshim.domain.volumes.pod_mounts import hosts_file
from virtshim.lifecycle.creation.step import Draft
from virtshim.lifecycle.volumes.copies import VolumeCopies
from virtshim.lifecycle.volumes.sysprep_files import sysprep_files
from virtshim.ports.seeds import GuestSeeds, SeedRequest
from virtshim.primitives import observed

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Seed:
    measured_as: ClassVar[observed.Step] = observed.Step.SEED
    seeds: GuestSeeds
    copies: VolumeCopies

    def make(self, draft: Draft) -> Draft:
        copied = self.copies.seed(draft.container.spec.copies)
        draft = draft.with_disk(self.seeds.create(_request(draft, copied)))
        own, options = draft.container.id, draft.options
        if options.ignition:
            path = self.seeds.write_ignition(own, options.ignition)
            draft = dataclasses.replace(draft, ignition_file=path)
        if options.sysprep:
            config, pod = draft.container.config, draft.sandbox.key.uid
            files = sysprep_files(self.copies.files, config, pod, options.sysprep)
            if files:
                draft = dataclasses.replace(draft, sysprep_iso=self.seeds.write_sysprep(own, files))
            else:  # an init container's, or of a pod of which kubelet was not asked
                log.warning("sysprep.not_mounted", container=own.short, path=options.sysprep)
        return draft

    def undo(self, container: Container) -> None:
        """They lie in the container's directory, which goes with the root disk."""


def _request(draft: Draft, copied: bytes) -> SeedRequest:
    container, sandbox, network = draft.container, draft.sandbox, draft.sandbox.network
    return SeedRequest(
        container=container.id,
        pod=sandbox.key,
        hostname=sandbox.config.hostname or sandbox.key.name,
        options=draft.options,
        interfaces=nics_of(network, container.granted),
        dns=network.dns if network else Dns(),
        hosts_file=hosts_file(container.config.mounts, container.config.annotations),
        envs=guest_view.environment(container.config.envs, container.granted),
        blocks=container.granted.data_volumes,
        kept_disk=draft.kept_disk,
        volumes=container.spec.volumes,
        sysctls=sandbox.config.sysctls,
        copies=container.spec.copies,
        copied=copied,
        empty_disks=container.spec.empty_disks,
        memory_volumes=container.spec.memory_volumes,
    )
