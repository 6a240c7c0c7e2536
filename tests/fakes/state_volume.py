"""Nodes with one key, and a volume that follows a VM's pods from one to another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fakes.lasting import vm
from fakes.world import World, container_config, sandbox_config

from virtshim.config.vms import Saved
from virtshim.model.container import Mount
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import PodKey

ON_VOLUME = {
    "virtshim.io/vm": "db",
    "virtshim.io/on-stop": "save",
    "virtshim.io/state-volume": "/state",
}
KEY = b"k" * 32


@dataclasses.dataclass
class Cluster:
    """Its `worlds` are the nodes."""

    directory: Path
    volume: Path
    worlds: list[World] = dataclasses.field(default_factory=list)
    pods: int = 0

    def node(self, key: bytes = KEY, **saved: Any) -> World:
        directory = self.directory / f"node-{len(self.worlds)}"
        directory.mkdir()
        file = directory / "key"
        file.write_bytes(key)
        file.chmod(0o600)
        world = World(directory, saved=Saved(key_file=str(file), **saved))
        if self.worlds:  # the disks of the fakes are no files, so they follow by themselves
            world.outside.disks.pod_disks = self.worlds[0].outside.disks.pod_disks
        self.worlds.append(world)
        return world

    def pod(self, world: World, annotations: dict[str, str] = ON_VOLUME) -> SandboxId:
        if not world.records.images.all():
            world.pull()
        self.pods += 1
        key = PodKey("default", "db-0", f"uid-{self.pods}", 0)
        return world.do.run_sandbox.run(key, sandbox_config(annotations=annotations), world.deadline())

    def create(self, world: World, **changes: Any) -> ContainerId:
        return self.create_in(world, self.pod(world), **changes)

    def create_in(self, world: World, pod: SandboxId, attempt: int = 0, **changes: Any) -> ContainerId:
        """`changes`: of the volume's mount."""
        mount = dataclasses.replace(Mount("/state", str(self.volume), readonly=False), **changes)
        return world.create(pod, attempt=attempt, config=container_config(mounts=(mount,)))

    def run(self, world: World) -> ContainerId:
        """A pod whose guest has booted, or continued."""
        container = self.create(world)
        world.start(container)
        return container

    def stop(self, world: World, container: ContainerId, *, written: str = "") -> None:
        """`written`: what the guest has written to its disk."""
        if written:
            self.write(world, written)
        world.stop(container, 30)
        world.remove_sandbox(world.container(container).sandbox_id)

    def write(self, world: World, text: str) -> None:
        Path(world.settings.layout().pod_disk(vm(world).disk)).write_text(text)

    def disk(self, world: World) -> str:
        return Path(world.settings.layout().pod_disk(vm(world).disk)).read_text()

    @property
    def folder(self) -> Path:
        (found,) = self.volume.iterdir()
        return found


def is_continued(world: World, container: ContainerId) -> bool:
    return world.container(container).status.known_as is not None


def saved_on_first(cluster: Cluster) -> tuple[World, World]:
    """Two nodes; the VM ran on the first, and was saved."""
    first, second = cluster.node(), cluster.node()
    cluster.stop(first, cluster.run(first), written="of the first node")
    return first, second
