"""Replays the order in which kubelet (1.30 to 1.36) asks for a pod's containers, against a virtshim of the contract
tests.

It is `computePodActions` and `SyncPod` of kubelet's kuberuntime_manager.go: the pod's state is read from the runtime each time, a
container that is refused is asked for again at the next sync, and the rest of the sync goes on. What is left out has no say in
the order: images, probes, back-off, hooks. The list of pods on the pod-resources socket is as kubelet fills it: a pod is there
before its sandbox, with all its regular containers and native sidecars, with devices or without; plain init containers and
ephemeral ones are never there."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from fakes.cri import Client, served
from fakes.pod_resources import FakePodResources, serving
from fakes.sysfs import FakeSysfs
from fakes.world import Outside, World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.devices.attachable import AttachChecker, AttachRules
from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.resolve import NodeDevices
from virtshim.kubelet.pod_resources import PodResourcesClient
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason


@dataclass(frozen=True)
class Asked:
    """A container that a sync wanted to start. `refusal`: "" if it runs now."""

    name: str
    refusal: str = ""
    code: grpc.StatusCode = grpc.StatusCode.OK

    @property
    def runs(self) -> bool:
        return not self.refusal


@dataclass
class KubeletPod:
    """A pod with restartPolicy Always, as kubelet keeps it. `init`: init containers in the order of the spec; those that are in
    `sidecars` too have restartPolicy Always. `books`: kubelet's pod-resources list, None for a kubelet that has none."""

    world: World
    client: Client
    books: FakePodResources | None
    name: str = "web"
    init: Sequence[str] = ()
    sidecars: Sequence[str] = ()
    containers: Sequence[str] = ("vm",)
    ephemeral: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    # The highest attempt whose log is there: kubelet counts on from it where the runtime has no record.
    _logged: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = [name for name in self.init if name in self.sidecars]
        for name in [*listed, *self.containers] if self.books else ():
            self.books.grant("default", self.name, name)

    # --- what happens to the pod

    def sync(self) -> list[Asked]:
        """Runs one SyncPod; returns the containers that it tried to start, in order."""
        sandbox = self.ready_sandbox()
        if sandbox is None:
            return self._start(self._new_sandbox(), [*self.init[:1]] or [*self.containers])
        known = self._latest()
        asked = self._start(sandbox, [name for name in self.ephemeral if name not in known])
        here = self._latest(sandbox)
        initialised, wanted = self._init_actions(here)
        asked += self._start(sandbox, wanted)
        if initialised:
            asked += self._start(sandbox, [name for name in self.containers if not _is_running(here.get(name))])
        return asked

    def synced(self) -> list[Asked]:
        """Syncs until nothing is left to do or everything is refused; returns the last sync that tried to start
        something."""
        last: list[Asked] = []
        while asked := self.sync():
            last = asked
            if not any(one.runs for one in asked):
                break
        return last

    def debug(self, name: str = "debugger") -> None:
        """`kubectl debug`; an ephemeral container cannot be removed again."""
        self.ephemeral.append(name)

    def ends(self, name: str, *, failed: bool = False) -> None:
        """Ends the guest of that container from inside."""
        made = self.running()[name]
        reason = OffReason.CRASHED if failed else OffReason.SHUTDOWN
        self.world.outside.vms.end(self.world.domain(ContainerId(made)), reason)
        self.world.outside.vms.settle()

    def loses_its_sandbox(self) -> None:
        """Loses the sandbox, as after a reboot of the node; the next sync creates a new one."""
        sandbox = self.ready_sandbox()
        assert sandbox is not None
        self.client.stop_pod(sandbox)

    def restarts_all_containers(self, source: str) -> None:
        """The action RestartAllContainers of a container's restart rule (1.35): all are killed and removed. First the regular
        ones, then init containers from the last to the first, and at last the one that ended. Then a sync begins with init[0]."""
        order = [name for name in (*self.containers, *reversed(self.init)) if name != source] + [source]
        for name in order:
            for one in [one for one in self._records() if one.metadata.name == name]:
                if one.state == pb.CONTAINER_RUNNING:
                    self.client.stop(one.id)
                self.client.remove(one.id)

    # --- what is there

    def ready_sandbox(self) -> str | None:
        """The newest sandbox, if it is ready."""
        newest = max(self._sandboxes(), key=lambda one: one.created_at, default=None)
        return newest.id if newest is not None and newest.state == pb.SANDBOX_READY else None

    def running(self) -> dict[str, str]:
        """Running containers by name."""
        return {one.metadata.name: one.id for one in self._records() if one.state == pb.CONTAINER_RUNNING}

    # --- kubelet's steps

    def _init_actions(self, here: dict[str, pb.Container]) -> tuple[bool, list[str]]:
        """Whether initialisation is complete, and which init containers to start."""
        if any(name in here for name in self.containers):
            return True, [name for name in self.init if name in self.sidecars and not _is_running(here.get(name))]
        for name in self.init:
            one = here.get(name)
            if _is_running(one):
                if name not in self.sidecars:
                    return False, []
            elif one is None or name in self.sidecars or self.client.status(one.id).exit_code:
                return False, [name]
        return True, []

    def _new_sandbox(self) -> str:
        before = self._sandboxes()
        for one in self.running().values():
            self.client.stop(one)
        for sandbox in before:
            self.client.stop_pod(sandbox.id)
        attempt = max((one.metadata.attempt + 1 for one in before), default=0)
        return self.client.run(self.name, attempt, annotations=self.annotations)

    def _start(self, sandbox: str, names: Sequence[str]) -> list[Asked]:
        return [self._started(sandbox, name) for name in names]

    def _started(self, sandbox: str, name: str) -> Asked:
        before = self._latest().get(name)
        attempt = before.metadata.attempt + 1 if before else self._logged.get(name, -1) + 1
        try:
            made = self.client.create(sandbox, name, attempt)
            self.client.start(made)
        except grpc.RpcError as refused:
            return Asked(name, refused.details() or "?", refused.code())
        self._logged[name] = attempt
        return Asked(name)

    def _sandboxes(self) -> list[pb.PodSandbox]:
        return [one for one in self.client.pods() if one.metadata.uid == f"uid-of-{self.name}"]

    def _records(self, sandbox: str = "") -> list[pb.Container]:
        """The container records, oldest first."""
        wanted = {sandbox} if sandbox else {one.id for one in self._sandboxes()}
        found = [one for one in self.client.containers() if one.pod_sandbox_id in wanted]
        return sorted(found, key=lambda one: one.created_at)

    def _latest(self, sandbox: str = "") -> dict[str, pb.Container]:
        return {one.metadata.name: one for one in self._records(sandbox)}


def _is_running(one: pb.Container | None) -> bool:
    return one is not None and one.state == pb.CONTAINER_RUNNING


@contextlib.contextmanager
def node(directory: Path, *, books: FakePodResources | None) -> Iterator[tuple[World, Client]]:
    """A virtshim with one image that asks kubelet on a real socket; nobody listens there if `books` is None."""
    (directory / "state").mkdir()
    files, short = FakeSysfs(directory / "host").files(), tempfile.mkdtemp(prefix="ko-")
    asking = PodResourcesClient(f"{short}/s")
    rules = AttachRules(bind=True, keep=(), lockable=lambda: None)
    devices = NodeDevices(files, CdiDirectories((), files), asking, AttachChecker(files, rules))
    outside = Outside(devices=devices)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, short)
        stack.callback(asking.close)
        if books is not None:
            stack.enter_context(serving(books, f"{short}/s"))
        world, client, _ = stack.enter_context(served(directory / "state", outside))
        world.pull()
        yield world, client
