"""A pod's life continues if the system refuses a thread, a descriptor, a watch or a sync once, at any request. The
caller repeats as kubelet does, and the next pod's life is as usual."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from fakes.cri import served
from fakes.disks import FakeRootDisks
from fakes.readings import FakeReadings
from fakes.resizing import FakeResizing
from fakes.scarcity import EPOLL, FSYNC, OPEN, THREAD, Scarcity
from fakes.vms import FakeVms
from fakes.waiting import eventually
from fakes.world import IMAGE, Outside

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.app.adapters import Adapters
from virtshim.disks.disk_places import DiskPlacesFiles
from virtshim.guest.command import CommandResult, GuestCommand
from virtshim.logs.follower import ConsoleLogs
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.model.vm import OffReason, PowerState
from virtshim.store.copies import RecordCopyFiles
from virtshim.store.records import SqliteRecords
from virtshim.system.clock import SystemClock
from virtshim.system.files import remove_tree
from virtshim.system.threads import lasting_threads
from virtshim.vm.ends import QemuExitWatcher
from virtshim.vm.events import Lifecycle

R = TypeVar("R")

# kubelet repeats what failed for as long as the pod is wanted.
TRIES = 3


class Directories(FakeRootDisks):
    """Disks in memory, with each container's directory on disk."""

    layout: Layout

    def make_directory(self, container: ContainerId) -> None:
        super().make_directory(container)
        Path(self.layout.container_dir(container)).mkdir(parents=True, exist_ok=True)

    def half_create(self, container: ContainerId, *others: Any) -> None:
        super().half_create(container, *others)
        self.make_directory(container)

    def delete(self, container: ContainerId, *, disk_alone: bool = False) -> None:
        if not disk_alone:
            remove_tree(self.layout.containers, container.value)
        super().delete(container, disk_alone=disk_alone)


class Vms(FakeVms):
    """VMs, each with a sleeping shell as process, whose end is watched like that of a QEMU; events arrive as libvirt's
    do."""

    def __init__(self, outside: Outside, directory: Path) -> None:
        super().__init__(outside.clock)
        self._directory = directory
        self._processes: dict[uuid.UUID, subprocess.Popen[bytes]] = {}
        self.lifecycle = Lifecycle(lambda: list(self.domains))
        self.ends = QemuExitWatcher(str(directory), self.lifecycle.happened, is_embedded=True)
        self.by_itself = True
        super().on_power_event(self.lifecycle.happened)

    def on_power_event(self, callback: Callable[[uuid.UUID], None]) -> None:
        self.lifecycle.add_callback(callback)

    def start(self, domain: uuid.UUID, container: ContainerId | None = None) -> None:
        super().start(domain, container)
        process = subprocess.Popen(["sh", "-c", "echo; read line", str(domain)], stdin=-1, stdout=-1)
        self._processes[domain] = process
        assert process.stdout is not None
        process.stdout.read(1)  # its command line can be read
        name = self.domains[domain].name
        (self._directory / f"{name}.pid").write_text(f"{process.pid}\n")
        (self._directory / f"{name}.xml").write_text("<domstatus state='running' reason='x' pid='1'>")
        with contextlib.suppress(OSError, RuntimeError):  # the VM is on
            self.ends.follow(domain, name)

    def _change(self, domain: uuid.UUID, state: PowerState) -> None:
        super()._change(domain, state)
        if not state.is_on and domain in self._processes:
            process = self._processes.pop(domain)
            process.kill()
            process.communicate()

    def close(self) -> None:
        super().close()
        self.lifecycle.close()
        self.ends.close()


class Node:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.set_up: list[GuestCommand] = []
        self.parts = contextlib.ExitStack()
        outside = Outside(disks=Directories(), dressed=self._dressed)
        (directory / "qemu").mkdir()
        self.vms = outside.vms = Vms(outside, directory / "qemu")
        outside.readings = FakeReadings(outside.vms, outside.clock.now_ns)
        outside.resizing = FakeResizing(outside.vms)
        outside.guests.do = self._run
        outside.files.publish(IMAGE, b"a disk")
        self.world, self.client, _ = self.parts.enter_context(served(directory, outside))
        self.world.outside.vms.on_power_event(self.world.app.guest_set_up.changed)

    def _dressed(self, adapters: Adapters, layout: Layout) -> Adapters:
        Directories.layout = layout
        consoles = self.parts.enter_context(contextlib.closing(ConsoleLogs(layout, SystemClock())))
        copies, places = RecordCopyFiles(layout), DiskPlacesFiles(layout)
        files = dataclasses.replace(adapters.files, copies=copies, disk_places=places)
        return dataclasses.replace(adapters, files=files, guest=dataclasses.replace(adapters.guest, consoles=consoles))

    def _run(self, command: GuestCommand, *_: object) -> CommandResult:
        self.set_up.append(command)
        return CommandResult(0, b"", b"")

    def look(self) -> None:
        """Runs the periodic work of background threads."""
        self.world.app.watch.look()

    def asked(self, call: Callable[[], R]) -> R:
        for _ in range(TRIES):
            try:
                return call()
            except grpc.RpcError:
                self.look()
        return call()

    def live(self, pod: str) -> None:
        """The life of a pod whose guest restarts once, and ends by itself; kubelet repeats failed calls."""
        client, logs = self.client, str(self.directory / "logs")
        linux = pb.LinuxPodSandboxConfig(sysctls={"net.core.somaxconn": "321"})
        self.asked(client.pull)
        sandbox = self.asked(lambda: client.run(pod, linux=linux, log_directory=logs))
        container = self._started(sandbox)
        domain = self.world.domain(ContainerId(container))
        self._eventually(lambda: self.set_up)
        self.vms.settle()
        self._eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("set-up-")])
        self.set_up.clear()
        self.vms.reset(domain)
        self._eventually(lambda: self.set_up)
        self.vms.end(domain, OffReason.SHUTDOWN)
        self._eventually(lambda: self.asked(lambda: client.status(container)).state == pb.CONTAINER_EXITED)
        again = self._started(sandbox, attempt=TRIES)
        self.asked(lambda: client.stop(again))
        for each in self.asked(client.containers):
            self.asked(lambda one=each.id: client.remove(one))  # type: ignore[misc]
        self.asked(lambda: client.stop_pod(sandbox))
        self.asked(lambda: client.remove_pod(sandbox))
        self.set_up.clear()

    def _started(self, sandbox: str, attempt: int = 0) -> str:
        for number in range(attempt, attempt + TRIES):
            made = self.asked(lambda at=number: self.client.create(sandbox, attempt=at))  # type: ignore[misc]
            with contextlib.suppress(grpc.RpcError):
                self.client.start(made)
                return made
        raise AssertionError("the pod never came up")

    def _eventually(self, holds: Callable[[], object]) -> None:
        def look() -> object:
            self.look()
            return holds()

        eventually(look)

    def wrong(self) -> Iterator[str]:
        """What is wrong after all pods were removed."""
        for _ in range(2):  # leftovers are searched twice
            self.world.app.recovery.reconcile.look()
            self.world.outside.clock.advance(61)
        yield from self.world.everything()
        yield from (str(path) for path in (self.directory / "containers").glob("*"))
        yield from (f"thread {name} has died" for name, runs in lasting_threads().items() if not runs)
        stored = SqliteRecords(str(self.directory / "state.db"))
        if stored.images.all() != self.world.records.images.all():
            yield "the database has other records than memory"
        stored.close()


def lived(scarcity: Scarcity) -> None:
    with tempfile.TemporaryDirectory(prefix="refused-") as directory, scarcity.installed():
        node = Node(Path(directory))
        with node.parts:
            with scarcity.reigning():
                node.live("first")
            node.live("next")
            wrong = list(node.wrong())
            assert not wrong, f"after {scarcity.kind} {scarcity.at} at {scarcity.refused}: {wrong}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [THREAD, OPEN, EPOLL, FSYNC])
def test_a_request_succeeds_after_the_system_refused_a_resource_once(kind: str) -> None:
    for at in itertools.count(1):
        scarcity = Scarcity(kind, at)
        lived(scarcity)
        if not scarcity.refused:
            break
    assert at > 1, f"nobody asks for {kind}"
