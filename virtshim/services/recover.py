"""Start-up: makes records and the world agree. Nothing is answered to callers before this is through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from virtshim.domain.container import Container, Exit, ExitReason
from virtshim.domain.errors import ShimError
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.domain.sandbox import Sandbox
from virtshim.domain.vm import OwnedDomain
from virtshim.ports import Clock, Hypervisor, PodNetworks, Records, RootDisks
from virtshim.services.checkpoint_container import CheckpointContainer
from virtshim.services.container_commands import ContainerCommands
from virtshim.services.exits import Exits, how_it_ended
from virtshim.services.images import ImageUse
from virtshim.services.logs import Logs
from virtshim.services.recover_plan import Found, plan
from virtshim.services.remove_container import RemoveContainer

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recover:
    """`timeout`: seconds for each call to tapmanager."""

    records: Records
    hypervisor: Hypervisor
    networks: PodNetworks
    logs: Logs
    disks: RootDisks
    images: ImageUse
    exits: Exits
    remove_container: RemoveContainer
    checkpoints: CheckpointContainer
    commands: ContainerCommands
    clock: Clock
    timeout: float

    def run(self, *, rebooted: bool) -> None:
        """Raises what reading raises (then nothing was changed). A failed repair of one item is logged and the others go
        on: the item's record stays, so nothing is forgotten."""
        found = Found(
            sandboxes=self.records.sandboxes.all(),
            containers=self.records.containers.all(),
            domains=self.hypervisor.owned(),
            networks=self.networks.attached(self.timeout),
            directories=self.disks.existing(),
            pods_kept=self.disks.pods_kept(),
            rebooted=rebooted,
        )
        todo = plan(found)
        self._each("stray domain", todo.stray_domains, self._drop_domain)
        self._each("unwanted domain", todo.unwanted_domains, self._end_domain)
        self._each("half-made container", todo.undo_containers, self.remove_container.remove)
        self._each("stray directory", todo.stray_directories, self._drop_directory)
        self._each("stray disks of a pod", todo.stray_pod_disks, self.disks.delete_kept)
        self._each("started container", todo.adopt, self._adopt)
        self._each("running container", todo.follow, self._follow)
        self._each("ended container", todo.settle, self._settle_rebooted if rebooted else self._settle)
        self._each("half-made sandbox", todo.undo_sandboxes, self._undo_sandbox)
        self._each("sandbox without network", todo.lost_networks, self._lost_network)
        self._each("stray network", todo.stray_networks, self._drop_network)
        left = [c for c in self.records.containers.all() if c.checkpointing]
        self._each("unfinished checkpoint", left, self.checkpoints.finish_left)
        self.images.collect_all()
        log.info(
            "recovered", sandboxes=len(found.sandboxes), containers=len(found.containers), running=len(todo.follow)
        )

    def _each(self, what: str, items: Iterable[T], repair: Callable[[T], object]) -> None:
        for item in items:
            try:
                repair(item)
                log.info("recover.done", what=what, item=_name(item))
            except ShimError as exc:
                log.warning("recover.failed", what=what, item=_name(item), error=str(exc))

    def _drop_domain(self, domain: OwnedDomain) -> None:
        self.hypervisor.destroy(domain.uuid, domain.container_id)
        self.hypervisor.undefine(domain.uuid, domain.container_id)

    def _end_domain(self, domain: OwnedDomain) -> None:
        """Its start failed and could not be undone; RemoveContainer undefines it."""
        self.hypervisor.destroy(domain.uuid, domain.container_id)

    def _drop_directory(self, container: ContainerId) -> None:
        self.disks.delete(container)

    def _adopt(self, container: Container) -> None:
        """Killed between libvirt's start and our record."""
        self.logs.open(container)
        running = container.running(self.clock.now_ns())
        self.records.containers.replace(running)
        self.commands.follow(running)

    def _follow(self, container: Container) -> None:
        self.logs.open(container)
        self.commands.follow(container)

    def _settle(self, container: Container) -> None:
        self.exits.settle(container.id)

    def _settle_rebooted(self, container: Container) -> None:
        self.exits.finish_log(container)
        how = Exit(255, ExitReason.UNKNOWN, self.clock.now_ns(), "the node was restarted")
        self.records.containers.replace(container.exited(how_it_ended(container, how)))

    def _undo_sandbox(self, sandbox: Sandbox) -> None:
        self.networks.release(sandbox.id, self.timeout)
        self.records.sandboxes.delete(sandbox.id)

    def _lost_network(self, sandbox: Sandbox) -> None:
        """kubelet replaces a sandbox that is not ready; its own StopPodSandbox releases what CNI still holds."""
        self.records.sandboxes.replace(sandbox.not_ready("its network is gone (the node or tapmanager was restarted)"))

    def _drop_network(self, sandbox: SandboxId) -> None:
        self.networks.release(sandbox, self.timeout)


def _name(item: object) -> str:
    match item:
        case Sandbox(id=found) | Container(id=found):
            return found.short
        case OwnedDomain(name=name):
            return name
        case _:
            return str(item)
