"""The Protocols between the services and the outside. `virtshim.app` is the only place that knows who implements them.

Rules for every port: values of `virtshim.domain` in and out, never a type of the library behind it; errors are
`virtshim.domain.errors`; each delete is "make sure it is gone" and may be called twice; timeouts are seconds.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from virtshim.domain.cgroup import Limits
from virtshim.domain.container import Container
from virtshim.domain.guest_command import CommandResult, GuestCommand
from virtshim.domain.ids import ContainerId, ImageDigest, SandboxId
from virtshim.domain.image import Credentials, DiskFormat, FilesystemUse, Image
from virtshim.domain.main_command import News, ReadTo
from virtshim.domain.network import Dns, Interface, PodNetwork
from virtshim.domain.sandbox import PodKey, PortMapping, Sandbox
from virtshim.domain.streaming import AttachStreams, Ended, ExecRequest, Output, StreamRequest, Streams
from virtshim.domain.usage import DiskUse, DomainUsage, InterfaceUsage
from virtshim.domain.vm import Disk, OwnedDomain, PowerState, VmSpec
from virtshim.domain.vm_options import VmOptions


class Clock(Protocol):
    def now_ns(self) -> int:
        """Wall clock, nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds of a clock that never jumps."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """True if the event was set within that time."""


K_contra = TypeVar("K_contra", contravariant=True)
R = TypeVar("R")


class Table(Protocol[K_contra, R]):
    """One kind of record, by id. Every change is on disk when the call returns; reads come from memory and are cheap."""

    def add(self, record: R) -> None:
        """Raises AlreadyExists for a taken id or name."""

    def replace(self, record: R) -> None:
        """Raises NotFound if the row is gone."""

    def put(self, record: R) -> None:
        """Adds or replaces."""

    def delete(self, key: K_contra) -> None: ...

    def get(self, key: K_contra) -> R | None: ...

    def all(self) -> Sequence[R]:
        """In order of creation."""


class Records(Protocol):
    """The journal. Errors: ResourceExhausted (disk full), InternalError; WrongState for a container with another's claim."""

    @property
    def sandboxes(self) -> Table[SandboxId, Sandbox]: ...

    @property
    def containers(self) -> Table[ContainerId, Container]: ...

    @property
    def images(self) -> Table[ImageDigest, Image]: ...


class Hypervisor(Protocol):
    """Virtual machines. Errors: Unavailable (libvirt cannot be reached), NotFound, WrongState, InternalError."""

    def define(self, spec: VmSpec) -> None:
        """Makes the domain, with our owner mark; replaces an earlier definition of the same UUID that is ours. A UUID or
        name of a foreign domain is AlreadyExists."""

    def start(self, domain: uuid.UUID) -> None:
        """Boots it; returns when QEMU runs. WrongState if it runs already."""

    def ask_to_shut_down(self, domain: uuid.UUID) -> None:
        """ACPI power button. No error if it is off or gone already. Waits a moment only for a VM that hangs."""

    def destroy(self, domain: uuid.UUID, container: ContainerId) -> None:
        """Ends QEMU now. No error if it is off or gone, or another container's: a pod may choose the UUID of its VM, and
        then all attempts have the same."""

    def undefine(self, domain: uuid.UUID, container: ContainerId) -> None:
        """Removes the definition of a domain that is off. No error if it is gone or another container's."""

    def power(self, domain: uuid.UUID) -> PowerState:
        """Read from libvirt, never from memory. ABSENT if there is no such domain."""

    def owned(self) -> Sequence[OwnedDomain]:
        """All domains that carry this node's mark."""

    def watching(self, domain: uuid.UUID) -> AbstractContextManager[threading.Event]:
        """An event that is set at each life-cycle event of the domain. Enter before acting; an event is a hint: read
        `power` after it."""

    def on_power_event(self, callback: Callable[[uuid.UUID], None]) -> None:
        """`callback` is called from one worker thread (never libvirt's event thread) for each life-cycle event."""

    def trouble(self) -> str:
        """Why VMs cannot be run now, for people; "" if they can. Answers at once, from memory."""


class VmReadings(Protocol):
    """What VMs use. Raises nothing: numbers that cannot be had are left out."""

    def usage(self, wanted: Mapping[uuid.UUID, str]) -> Mapping[uuid.UUID, DomainUsage]:
        """`wanted` are UUIDs and names of VMs (those of their VmSpec). One call of libvirt's for all of them, and an answer
        within 3 s also when libvirt or a VM hangs: then with what else is known of it. VMs that are off are not in it."""


class VmResizing(Protocol):
    """Changes of a VM that exists; its definition changes with it, so a VM that is off starts with the new size. Errors:
    as Hypervisor; WrongState also for what this VM cannot have while it exists."""

    def add_vcpus(self, domain: uuid.UUID, count: int) -> None:
        """Brings it to `count` vCPUs; none is taken away."""

    def set_memory(self, domain: uuid.UUID, memory_bytes: int, timeout: float) -> None:
        """Guest memory, by the balloon. Returns when a running guest has given back what it is to give back; if it has
        not within the time, WrongState, and its memory is what it was."""

    def memory_in_use(self, domain: uuid.UUID) -> int | None:
        """Bytes that the guest cannot give back; None if it does not say (off, or no balloon driver)."""

    def set_limits(self, domain: uuid.UUID, limits: Limits) -> None:
        """Changes the limits where libvirt manages the VM's cgroup; nothing elsewhere."""


@dataclass(frozen=True, slots=True)
class VmGroup:
    """A container's cgroup (`virtshim.domain.cgroup.vm_group`), below `cgroup_parent` as the pod gave it."""

    sandbox: SandboxId
    container: ContainerId
    cgroup_parent: str
    limits: Limits
    oom_score_adj: int


class VmGroups(Protocol):
    """The cgroups of VMs, by way of tapmanager. Errors: Unavailable, InvalidRequest (a limit that the kernel refuses, by
    name), WrongState (less than is in use), InternalError, DeadlineExceeded."""

    def make(self, group: VmGroup, timeout: float) -> None:
        """The group with its limits; the sandbox's next VM starts in it."""

    def limit(self, group: VmGroup, timeout: float) -> None:
        """Other limits for a group that is there; all or nothing. NotFound if it is not there."""

    def remove(self, container: ContainerId, cgroup_parent: str, timeout: float) -> None:
        """WrongState if a VM is in it."""

    def oom_kills(self, container: ContainerId, cgroup_parent: str) -> int:
        """How often the kernel has killed in it for lack of memory; 0 if that cannot be known (any more)."""


@dataclass(frozen=True, slots=True)
class AttachRequest:
    sandbox: SandboxId
    pod: PodKey
    dns: Dns
    port_mappings: tuple[PortMapping, ...] = ()


class PodNetworks(Protocol):
    """Pod networks, by way of tapmanager. Errors: Unavailable (tapmanager is not there), InternalError (a CNI plugin
    failed; the message carries its words), DeadlineExceeded."""

    def attach(self, request: AttachRequest, timeout: float) -> PodNetwork:
        """Network namespace, CNI ADD, bridge and tap, DHCP. On error nothing is left, or `release` must still be called
        (it always may). A second attach of an attached sandbox returns the same network."""

    def release(self, sandbox: SandboxId, timeout: float) -> None:
        """CNI DEL and everything gone. No error if there was nothing."""

    def attached(self, timeout: float) -> frozenset[SandboxId]:
        """The sandboxes for which anything exists, half-made ones included."""

    def counters(self, timeout: float) -> Mapping[SandboxId, Sequence[InterfaceUsage]]:
        """The guest NICs of all attached sandboxes, counted since the attach; those that cannot be read are left out."""

    def lost(self, timeout: float) -> Mapping[SandboxId, str]:
        """Of the attached sandboxes those whose network does not work any more because a part of it is gone, and which."""

    def trouble(self) -> str:
        """Why no pod network can be made now (tapmanager gone, no CNI config); "" if one can. Answers within 1 s."""


@dataclass(frozen=True, slots=True)
class FetchedImage:
    """What a pull brought: `tag` is the full `name:tag` to list it under ("" when pulled by digest), `repo_digest` the
    `name@sha256:...` form ("" if the source has none)."""

    digest: ImageDigest
    tag: str
    repo_digest: str
    size: int
    virtual_size: int
    format: DiskFormat


class ImageFiles(Protocol):
    """Disk files by digest, and the sources they come from."""

    def fetch(self, reference: str, credentials: Credentials | None, cancelled: threading.Event) -> FetchedImage:
        """Downloads, checks the digest, verifies with qemu-img, stores. Always contacts the source (credentials must be
        checked each time); content already there is not stored twice. Concurrent fetches of one content are safe.
        Errors: InvalidRequest (malformed reference; unusable or dangerous image), NotFound, PermissionRefused,
        Unavailable, ResourceExhausted, DeadlineExceeded (`cancelled` was set). A failure leaves nothing behind."""

    def path(self, digest: ImageDigest) -> str:
        """Absolute path of the stored file, whether or not it is there."""

    def delete(self, digest: ImageDigest) -> None: ...

    def stored(self) -> frozenset[ImageDigest]:
        """Digests of all complete files."""

    def sweep(self) -> None:
        """Removes half-made files of an earlier process. Called once at start, before any fetch."""

    def use(self) -> FilesystemUse: ...


class RootDisks(Protocol):
    """Copy-on-write root disks: a container's own, and those that stay for a pod's life (by name, see
    `virtshim.domain.pod_disk`)."""

    def create(self, container: ContainerId, base: Image, base_path: str, size_bytes: int) -> Disk:
        """A qcow2 on top of the image, guest-visible size max(image, size_bytes). Replaces a half-made one."""

    def delete(self, container: ContainerId) -> None:
        """Removes the container's whole state directory: disk, seed, raw console log; no disk of the pod."""

    def make_directory(self, container: ContainerId) -> None:
        """The container's directories, for one whose root disk is the pod's. `create` makes them too."""

    def create_kept(self, name: str, base: Image, base_path: str, size_bytes: int) -> Disk:
        """As `create`, for the pod: it is there whole or not at all, and one that is there is never replaced."""

    def kept(self, name: str) -> Disk | None:
        """The pod's disk of that name, if it is there."""

    def delete_kept(self, pod: str) -> None:
        """All disks of that pod (`pod_disk.pod_part`)."""

    def pods_kept(self) -> frozenset[str]:
        """The pods that something is there of."""

    def existing(self) -> frozenset[ContainerId]:
        """Containers that have a state directory."""

    def use(self, container: ContainerId, kept: str = "") -> DiskUse | None:
        """What the container's state directory takes, its root disk first of all; and the pod's disk `kept`, if it runs on that.
        None if there is no directory."""

    def room(self) -> int:
        """Bytes that disks may still grow by."""


@dataclass(frozen=True, slots=True)
class SeedRequest:
    """What cloud-init is told. `interfaces` empty, or `options.force_dhcp`, leaves network-config out."""

    container: ContainerId
    pod: PodKey
    hostname: str
    options: VmOptions
    interfaces: tuple[Interface, ...]
    dns: Dns


class GuestSeeds(Protocol):
    """cloud-init seed ISOs."""

    def create(self, request: SeedRequest) -> Disk:
        """Writes the ISO into the container's directory (made if missing)."""


class Consoles(Protocol):
    """Serial console to CRI log."""

    def open(self, container: ContainerId, log_file: str, log_directory: str = "") -> None:
        """From now on console bytes go to `log_file` in CRI format ("": nowhere); the file (and its directory) exists on
        return, and QEMU's own file is kept in bounds; below `log_directory` ("": its own) no symbolic link is followed.
        Continues where an earlier process stopped. No error if open already."""

    def reopen(self, container: ContainerId) -> None:
        """The log file was renamed: from now on bytes go to a new one of the old name, which exists on return. On error
        none was made, and the old one is written on. WrongState if not open; nothing to do for a log that is discarded."""

    def finish(self, container: ContainerId) -> None:
        """Writes what is left (the VM is off), then stops following, also if writing failed. No error if not open."""


class CommandLogs(Consoles, Protocol):
    """CRI logs of the containers' own commands, both streams in one file."""

    def read_to(self, container: ContainerId) -> ReadTo:
        """What the last `write`, maybe of an earlier process, was told."""

    def write(self, container: ContainerId, output: Sequence[Output], read_to: ReadTo) -> int:
        """Both are on disk on return, and so many bytes of log are new. After an error neither is, and it may be tried again.
        WrongState if not open."""


class StreamSession(Protocol):
    """A running command, or a client's share of a console. Lives on the streaming loop: all its coroutines are called there,
    `read` by one task, `write_stdin` and `close_stdin` by a second, `resize` by a third, all at the same time. Both sides are
    bounded: who reads slowly slows the command down (a console loses output instead)."""

    async def read(self) -> Output | Ended:
        """The next piece of output (at most 64 KiB), in the order it came; `Ended` once, last. ShimError if the session broke."""

    async def write_stdin(self, data: bytes) -> None:
        """Returns when there is room for more. What nobody reads any more is thrown away without an error."""

    async def close_stdin(self) -> None:
        """End of input. May be called twice."""

    async def resize(self, width: int, height: int) -> None:
        """The client's terminal has so many columns and rows. No error without a terminal."""

    async def close(self) -> None:
        """The client is gone: ends the command if it still runs. Called exactly once, also after `Ended` or an error; must
        neither raise nor take longer than a few seconds."""


class Execs(Protocol):
    """Commands in guests. Errors: Unavailable (no guest agent answers), NotFound (no such program), WrongState."""

    async def start(self, request: ExecRequest) -> StreamSession: ...
    async def dial(self, container: ContainerId, port: int) -> StreamSession:
        """Its input and output are a TCP connection to its guest's loopback; stderr and an exit code tell why there is none."""


class GuestAgents(Protocol):
    """Running guests, asked from within by way of the QEMU guest agent. What a guest says may be false; it is limited in size
    and time. Errors: WrongState (no agent has come up in a minute; the agent may not run commands), DeadlineExceeded,
    Unavailable (the VM ended, the agent broke off), ResourceExhausted (all ports for commands are in use), InvalidRequest
    (no such directory or user in the guest), InternalError."""

    def run(
        self, container: ContainerId, command: GuestCommand, timeout: float, cancelled: threading.Event
    ) -> CommandResult:
        """Waits for the agent to come up, and for the command's end; `timeout` seconds in all, 0 for no limit. Then, or when
        `cancelled` is set (Aborted), the command and its children are killed. At most 16 MiB of each stream are kept."""

    async def open(self, container: ContainerId, command: GuestCommand, streams: Streams) -> StreamSession:
        """As `run`, without a time limit; returns when the command is being started."""

    def begin(self, container: ContainerId, command: GuestCommand, timeout: float, cancelled: threading.Event) -> None:
        """Starts the container's own command. One that was begun before, in this boot of the guest, is not begun again. Waits
        `timeout` seconds for the agent: DeadlineExceeded. After that, Unavailable, and Aborted (`cancelled` was set), it may be
        tried again; another error says that it is no use."""

    def news(self, container: ContainerId, read_to: ReadTo) -> News:
        """What the container's own command has written behind `read_to`, a piece of each stream, and whether it has ended.
        What is before `read_to` is not needed any more and may be dropped. After any error it may be tried again."""

    def is_there(self, container: ContainerId) -> bool:
        """False if the command was begun, and the guest knows nothing of it (any more)."""

    def facts(self, container: ContainerId, timeout: float) -> Mapping[str, object]:
        """What the guest says of itself, as a JSON document of some KiB at most; what it does not say within `timeout` seconds
        is left out. Never raises."""

    def forget(self, container: ContainerId) -> None:
        """The VM is gone: closes the connection. No error if there is none."""


class Attaches(Protocol):
    """Consoles. Errors: Unavailable (the console cannot be reached), WrongState, ResourceExhausted."""

    async def attach(self, request: AttachStreams) -> StreamSession: ...


class Streaming(Protocol):
    """The server that kubelet takes its users' connections to. Called from any thread; answers at once."""

    def offer(self, request: StreamRequest) -> str:
        """A URL that serves this request once, within a minute. ResourceExhausted if too many wait."""

    def end_container(self, container: ContainerId) -> None:
        """The container has ended: its sessions end, and URLs that wait for it are void."""

    def end_sandbox(self, sandbox: SandboxId) -> None:
        """The same for the pod's port forwards."""
