"""Two nodes that move a VM between them: real links and certificates, and VMs that are fakes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from fakes.journal import WAIT_LIMIT
from fakes.node_certificates import ClusterCa
from fakes.waiting import eventually
from fakes.world import Outside, World, sandbox_config

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import ShimError, Unavailable
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import PodKey, vm_disk_name
from virtshim.model.vm import Power
from virtshim.moves.values import VmRecord
from virtshim.peers.client import PeerClient
from virtshim.peers.ports import PeerLink
from virtshim.peers.server import PeerServer, by_operation
from virtshim.system.live import Live

NAMED = {"virtshim.io/vm": "db"}
DISK = vm_disk_name("default", "db", "vm")


class Node:
    """`cut`: whether the connection breaks where this node would send or receive that message."""

    def __init__(self, name: str, directory: Path, ca: ClusterCa, addresses: dict[str, str]) -> None:
        self.name = name
        self.files = ca.node(name)
        self.addresses = addresses
        self.cut: Callable[[str, Mapping[str, Any]], bool] = lambda _way, _message: False
        directory.mkdir()
        outside = Outside(peers=PeerClient(self.files, Live(addresses)))
        self.use(World(directory, outside))

    @property
    def address(self) -> str:
        return self.addresses[self.name]

    def use(self, world: World) -> None:
        """The daemon of this node, from now on."""
        self.world = world
        self._server = PeerServer("127.0.0.1:0", self.files, self._handle)
        self._server.start()
        self.addresses[self.name] = f"127.0.0.1:{self._server.port}"

    def stop_serving(self) -> None:
        self._server.close()

    def close(self) -> None:
        self._server.close()
        self.world.close()

    def restart(self, *, rebooted: bool = False) -> None:
        """As after SIGKILL: the next daemon recovers."""
        self._server.close()
        self.use(self.world.recovered(rebooted=rebooted))

    def _handle(self, link: PeerLink) -> None:
        by_operation(self.world.app.sending.handlers)(_Cuttable(link, self))

    @contextlib.contextmanager
    def silent(self, operation: str) -> Iterator[Silent]:
        """It does not answer other nodes that ask for this operation."""
        before = self.world.app
        found = Silent(dict(before.sending.handlers))
        found.handlers[operation] = found.hear
        self.world.app = dataclasses.replace(before, sending=cast(Any, found))
        try:
            yield found
        finally:
            found.over.set()
            self.world.app = before

    # --- pods of the VM

    def pod(self, number: int, annotations: Mapping[str, str] = NAMED) -> SandboxId:
        if not self.world.records.images.all():
            self.world.pull()
        key = PodKey("default", "db", f"uid-{self.name}-{number}", 0)
        config = sandbox_config(annotations=dict(annotations))
        return self.world.do.run_sandbox.run(key, config, self.world.deadline())

    def create(
        self, number: int = 1, annotations: Mapping[str, str] = NAMED, content: bytes | None = None
    ) -> ContainerId:
        """`content`: of the root disk, unless it is there."""
        return self.create_in(self.pod(number, annotations), content=content)

    def create_in(self, pod: SandboxId, attempt: int = 0, content: bytes | None = None) -> ContainerId:
        container = self.world.create(pod, attempt=attempt)
        if content is not None or not self.disk.exists():
            self.disk.write_bytes(content or b"")
        return container

    def run(self, content: bytes) -> ContainerId:
        container = self.create(content=content)
        self.world.start(container)
        return container

    @property
    def disk(self) -> Path:
        return Path(self.world.settings.layout().pod_disk(DISK))

    @property
    def vm(self) -> VmRecord | None:
        return self.world.app.adapters.files.vms.get(DISK)

    def power(self, container: ContainerId) -> Power:
        return self.world.outside.vms.power(self.world.domain(container)).power

    def phase(self, container: ContainerId) -> ContainerPhase:
        return self.world.container(container).phase

    def until_here(self, container: ContainerId) -> None:
        def has_arrived() -> bool:
            found = self.world.container(container)
            return found.status.known_as is not None and not found.status.arriving

        eventually(has_arrived)

    def until_ended(self, container: ContainerId) -> None:
        eventually(lambda: self.phase(container) is ContainerPhase.EXITED)


@dataclasses.dataclass
class Silent:
    """Hears an operation of other nodes, and never answers."""

    handlers: dict[str, Callable[[PeerLink, dict[str, Any]], None]]
    asked: threading.Event = dataclasses.field(default_factory=threading.Event)
    over: threading.Event = dataclasses.field(default_factory=threading.Event)

    def hear(self, _link: PeerLink, _asked: dict[str, Any]) -> None:
        self.asked.set()
        self.over.wait(WAIT_LIMIT)


class _Cuttable:
    """A link that breaks where its node says so."""

    def __init__(self, link: PeerLink, node: Node) -> None:
        self._link = link
        self._node = node
        self.peer = link.peer

    def send(self, message: Mapping[str, object], timeout: float) -> None:
        self._check("send", message)
        self._link.send(message, timeout)

    def receive(self, timeout: float) -> dict[str, Any]:
        found = self._link.receive(timeout)
        self._check("receive", found)
        return found

    def _check(self, way: str, message: Mapping[str, Any]) -> None:
        if self._node.cut(way, message):
            self._link.close()
            raise Unavailable(f"node {self.peer}: closed the connection")

    def refuse(self, error: ShimError) -> None:
        self._link.refuse(error)

    def send_file(self, source: int, idle: float) -> int:
        return self._link.send_file(source, idle)

    def receive_file(self, sink: int, most: int, idle: float) -> int:
        return self._link.receive_file(sink, most, idle)

    def close(self) -> None:
        self._link.close()


@contextlib.contextmanager
def two_nodes(directory: Path, ca: ClusterCa | None = None) -> Iterator[tuple[Node, Node]]:
    """`here`, where the VM is, and `there`."""
    directory.mkdir(exist_ok=True)
    ca, addresses = ca or ClusterCa(directory), dict[str, str]()
    here, there = (Node(name, directory / name, ca, addresses) for name in ("here", "there"))
    try:
        yield here, there
    finally:
        here.close()
        there.close()
