"""CreateContainer: disk, seed and libvirt definition; nothing runs yet."""

from __future__ import annotations

import dataclasses
import os.path
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from virtshim.domain.annotations.options import VmOptions
from virtshim.domain.annotations.parse import parse_vm_options
from virtshim.domain.container import Container, ContainerConfig, ContainerName, ContainerPhase
from virtshim.domain.deadline import Deadline
from virtshim.domain.devices.granted import GrantedDevices
from virtshim.domain.errors import AlreadyExists, InvalidRequest, NotFound, ResourceExhausted, WrongState
from virtshim.domain.file_path import check_path
from virtshim.domain.ids import ContainerId, SandboxId
from virtshim.domain.image import Image
from virtshim.domain.layout import Layout, vnc_socket
from virtshim.domain.network import Dns, nics_of
from virtshim.domain.pod_disk import disk_name
from virtshim.domain.sandbox import Sandbox
from virtshim.domain.sizing import NodeLimits, limits_for, size_for
from virtshim.domain.vm import Disk, VmSize, VmSpec
from virtshim.lifecycle.images import ImageService
from virtshim.passthrough.borrowing import BorrowedDevices
from virtshim.passthrough.claims import DeviceClaims, NotYetFree
from virtshim.ports.clock import Clock
from virtshim.ports.disks import RootDisks
from virtshim.ports.hypervisor import Hypervisor
from virtshim.ports.images import ImageFiles
from virtshim.ports.recovery import StateRecords
from virtshim.ports.seeds import GuestSeeds, SeedRequest
from virtshim.primitives.clock import Stamps
from virtshim.primitives.inflight import Inflight, PodLocks
from virtshim.primitives.rollback import Rollback

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CreateContainer:
    """`free_hugepages`: page size -> bytes that are free in such pages. `run_commands`: for pods that do not say it."""

    records: StateRecords
    hypervisor: Hypervisor
    files: ImageFiles
    images: ImageService
    disks: RootDisks
    seeds: GuestSeeds
    clock: Clock
    stamps: Stamps
    locks: PodLocks
    inflight: Inflight[ContainerId]
    layout: Layout
    sizes: NodeLimits
    tapmanager_socket: str
    free_hugepages: Callable[[int], int]
    claims: DeviceClaims
    borrowed: BorrowedDevices
    run_commands: bool = True

    def create(
        self, sandbox_id: SandboxId, name: ContainerName, config: ContainerConfig, deadline: Deadline
    ) -> ContainerId:
        """Returns the id of a CREATED container. A repeat returns the first's id; the same name with something different
        is AlreadyExists."""
        key = f"container {name} in sandbox {sandbox_id}"
        left = deadline.left(self.clock.monotonic())
        return self.inflight.run(key, config, lambda: self._create(sandbox_id, name, config, deadline), timeout=left)

    def _create(
        self, sandbox_id: SandboxId, name: ContainerName, config: ContainerConfig, deadline: Deadline
    ) -> ContainerId:
        """kubelet grants a device anew as soon as its container has ended, which is before it is reset."""
        while True:
            try:
                return self._create_now(sandbox_id, name, config, deadline)
            except NotYetFree as held:
                self.claims.await_free(held, deadline.left(self.clock.monotonic()))

    def _create_now(
        self, sandbox_id: SandboxId, name: ContainerName, config: ContainerConfig, deadline: Deadline
    ) -> ContainerId:
        with self.locks.held(sandbox_id):
            sandbox = self.records.sandboxes.get(sandbox_id)
            if sandbox is None:
                raise NotFound(f"no such pod sandbox: {sandbox_id}")
            if not sandbox.is_ready:
                raise WrongState(f"pod sandbox {sandbox_id} is not ready ({sandbox.reason or sandbox.phase.value})")
            earlier = self._earlier(sandbox_id, name, config)
            if earlier is not None:
                return earlier
            self._refuse_beside_another(sandbox_id)
            options = parse_vm_options(sandbox.config.annotations)
            granted = self.claims.resolve(sandbox, name, config)
            _log_missing_nics(sandbox, name, granted)
            size = size_for(options, config.resources, self.sizes, pins_memory=granted.pins_memory)
            self.claims.check(granted, size)
            self._refuse_without_hugepages(size)
            log_file = log_file_for(sandbox, config)
            deadline.check(self.clock.monotonic(), "the container was created")
            with self.images.pinned(config.image) as image:
                container = Container(
                    id=ContainerId(secrets.token_hex(32)),
                    sandbox_id=sandbox_id,
                    name=name,
                    config=config,
                    image=image.digest,
                    image_ref=image.repo_digests[0] if image.repo_digests else image.digest.value,
                    domain_uuid="",
                    created_at=self.stamps.next(),
                    log_file=log_file,
                    cgroup_parent=sandbox.config.cgroup_parent,
                    size=size,
                    pod_disk=disk_name(sandbox.key, name.name) if options.keep_root_disk else "",
                    command=self._command(options, config),
                    granted=granted,
                    claims=granted.claims,
                )
                domain = options.system_uuid or container.id.domain_uuid()
                container = dataclasses.replace(container, domain_uuid=str(domain))
                self._refuse_taken_uuid(domain, options, sandbox)
                self.claims.add(container, sandbox)  # from here on the record keeps the image and the devices
                if container.pod_disk and self.disks.pod_disk(container.pod_disk) is None:
                    sandbox = self._note_pod_disk(sandbox, container)
            self._make(container, sandbox, image, options)
            return container.id

    def _earlier(self, sandbox: SandboxId, name: ContainerName, config: ContainerConfig) -> ContainerId | None:
        for other in self.records.containers.all():
            if other.sandbox_id == sandbox and other.name == name:
                if other.was_never_created:
                    self._drop(other)  # not being created: we hold the pod's lock. Its rollback failed
                    continue
                if other.phase is ContainerPhase.CREATED and other.config == config:
                    return other.id
                raise AlreadyExists(
                    f"container {name} already exists in sandbox {sandbox}: {other.id} ({other.phase.value}); "
                    "remove it first"
                )
        return None

    def _refuse_beside_another(self, sandbox: SandboxId) -> None:
        for other in self.records.containers.all():
            if other.sandbox_id == sandbox and other.phase is ContainerPhase.RUNNING:
                raise WrongState(
                    f"container {other.id} ({other.name.name}) runs in this pod: a pod is one virtual machine, so its "
                    "containers are created and run one after another. Use one container, or init containers"
                )

    def _command(self, options: VmOptions, config: ContainerConfig) -> tuple[str, ...]:
        """A disk image has no entrypoint that `args` alone could be given to, so they are the command then."""
        run = self.run_commands if options.run_command is None else options.run_command
        return (*config.command, *config.args) if run else ()

    def _refuse_taken_uuid(self, domain: uuid.UUID, options: VmOptions, sandbox: Sandbox) -> None:
        """Attempts of one pod have the same UUID, one after another; its definition goes to the newest."""
        if options.system_uuid is None:
            return
        for other in self.records.containers.all():
            if other.domain_uuid != str(domain):
                continue
            owner = self.records.sandboxes.get(other.sandbox_id)
            is_earlier = owner is not None and owner.key.is_same_pod(sandbox.key)
            if not (is_earlier and other.phase is ContainerPhase.EXITED and not other.may_be_running):
                raise AlreadyExists(
                    f"VirtletSystemUUID {domain} is already used by container {other.id}; a UUID names one VM on a node"
                )

    def _refuse_without_hugepages(self, size: VmSize) -> None:
        free = self.free_hugepages(size.page_bytes) if size.page_bytes else size.memory_bytes
        if free < size.memory_bytes:
            raise ResourceExhausted(
                f"resources.limits.hugepages: the virtual machine needs {size.memory_bytes} bytes in huge pages of "
                f"{size.page_bytes}; this node has {free} free (vm.nr_hugepages, or hugepages= on the kernel command line)"
            )

    def _note_pod_disk(self, sandbox: Sandbox, container: Container) -> Sandbox:
        """Written before the disk is made: the image under it must stay as long as the disk does, and whoever removes
        the pod's last sandbox must know of it."""
        noted = sandbox.with_root_disk(container.name.name, container.image)
        self.records.sandboxes.replace(noted)
        return noted

    def _root_disk(self, container: Container, image: Image, options: VmOptions) -> Disk:
        path = self.files.path(image.digest)
        if not container.pod_disk:
            return self.disks.create(container.id, image, path, options.root_volume_bytes)
        self.disks.make_directory(container.id)
        pod_disk = self.disks.pod_disk(container.pod_disk)
        return pod_disk or self.disks.create_pod_disk(container.pod_disk, image, path, options.root_volume_bytes)

    def _make(self, container: Container, sandbox: Sandbox, image: Image, options: VmOptions) -> None:
        with Rollback() as undo:
            undo.add("record", lambda: self._forget(container, undo))
            undo.add("files", lambda: self.disks.delete(container.id))
            self.borrowed.take(container.granted)
            root = self._root_disk(container, image, options)
            seed = self.seeds.create(_seed_request(container, sandbox, options))
            undo.add("domain", lambda: self.hypervisor.undefine(uuid.UUID(container.domain_uuid), container.id))
            self.hypervisor.define(self._vm(container, sandbox, options, (root, seed)))
            self.records.containers.replace(container.created())
            undo.commit()
        log.info(
            "container.created", container=container.id.short, sandbox=sandbox.id.short, image=str(image.digest)[:19]
        )

    def _drop(self, container: Container) -> None:
        self.hypervisor.undefine(uuid.UUID(container.domain_uuid), container.id)
        self.disks.delete(container.id)
        self.records.containers.delete(container.id)
        self.borrowed.give_back_of(container)
        self.images.collect(container.image)

    def _forget(self, container: Container, undo: Rollback) -> None:
        if undo.clean:
            self.records.containers.delete(container.id)
            self.borrowed.give_back_of(container)
            self.images.collect(container.image)  # it may have been removed meanwhile
        else:  # kubelet's RemoveContainer, or the next start of virtshim, finishes it
            self.records.containers.replace(container.removing())

    def _vm(
        self,
        container: Container,
        sandbox: Sandbox,
        options: VmOptions,
        disks: tuple[Disk, ...],
    ) -> VmSpec:
        size = container.size
        network = sandbox.network
        return VmSpec(
            uuid=uuid.UUID(container.domain_uuid),
            name=container.domain_name,
            container_id=container.id,
            sandbox_id=sandbox.id,
            vcpus=size.vcpus,
            memory_bytes=size.memory_bytes,
            max_vcpus=size.max_vcpus,
            max_memory_bytes=size.max_memory_bytes,
            page_bytes=size.page_bytes,
            disk_bus=options.disk_bus,
            disks=disks,
            console_socket=self.layout.console_socket(container.id),
            console_log=self.layout.console_log(container.id),
            agent_socket=self.layout.agent_socket(container.id),
            exec_sockets=tuple(self.layout.exec_socket(container.id, n) for n in range(options.exec_ports)),
            vnc_socket=vnc_socket(self.layout, container.id) if options.vnc else "",
            limits=limits_for(container.resources, sandbox.overhead, size, self.sizes),
            cgroup_parent=sandbox.config.cgroup_parent,
            cpu_model=options.cpu_model,
            smbios_uuid=options.system_uuid is not None,
            title=f"{sandbox.key.namespace}/{sandbox.key.name}/{container.name.name}",
            fetch_key=network.fetch_key if network else "",
            tapmanager_socket=self.tapmanager_socket if network else "",
            record=self.records.to_text(sandbox, container),
            granted=container.granted,
        )


def log_file_for(sandbox: Sandbox, config: ContainerConfig) -> str:
    """Absolute path of the CRI log, "" if none is wanted. Raises InvalidRequest for a path that leaves the directory."""
    if not config.log_path or not sandbox.config.log_directory:
        return ""
    directory = sandbox.config.log_directory
    if not os.path.isabs(directory):
        raise InvalidRequest(f"sandbox_config.log_directory must be absolute: {directory[:200]!r}")
    parts = config.log_path.split("/")
    outside = os.path.isabs(config.log_path) or ".." in parts or "\0" in config.log_path + directory
    if outside or os.path.normpath(config.log_path) == ".":
        raise InvalidRequest(f"config.log_path must name a file below the log directory: {config.log_path[:200]!r}")
    path = os.path.normpath(os.path.join(directory, config.log_path))
    check_path(path, "sandbox_config.log_directory and config.log_path")
    return path


def _log_missing_nics(sandbox: Sandbox, name: ContainerName, granted: GrantedDevices) -> None:
    """Usual for an init container, to which kubelet grants no device; a mistake for the one that asked for it."""
    there = nics_of(sandbox.network, granted)
    for nic in sandbox.network.interfaces if sandbox.network else ():
        if nic not in there:
            log.warning(
                "nic.not_granted", sandbox=sandbox.id.short, container=name.name, nic=nic.name, device=nic.function
            )


def _seed_request(container: Container, sandbox: Sandbox, options: VmOptions) -> SeedRequest:
    network = sandbox.network
    return SeedRequest(
        container=container.id,
        pod=sandbox.key,
        hostname=sandbox.config.hostname or sandbox.key.name,
        options=options,
        interfaces=nics_of(network, container.granted),
        dns=network.dns if network else Dns(),
    )
