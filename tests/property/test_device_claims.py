"""No two running VMs ever have the same device, whatever pods do, in any order, with failures and deaths in between."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from fakes.examples import examples
from fakes.journal import Crash, When
from fakes.world import World, container_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virtshim.devices.values import CriDevice
from virtshim.model.container import Container, ContainerPhase
from virtshim.model.errors import InternalError, ShimError
from virtshim.model.vm import OffReason

NODES = {"/dev/vfio/1": "0000:3b:00.1", "/dev/vfio/2": "0000:3b:00.2"}
PODS = ("a", "b", "c")


_CALLS = ("vms.destroy", "vms.start", "vms.define", "records.containers.replace", "disks.create", "drivers.bind")


class Node:
    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="claims-")
        self.world = World(Path(self.directory))
        for node, address in NODES.items():
            self.world.outside.devices.add_function(node, address)
            self.world.outside.drivers.drivers[address] = "iavf"
        self.world.pull()
        self.attempt = 0

    def end(self) -> None:
        self.world.journal.heal()
        for sandbox in list(self.world.records.sandboxes.all()):
            self.world.remove_sandbox(sandbox.id)
        assert self.world.everything() == []
        assert self.world.records.containers.all() == self.world.records.borrowed.all() == []
        assert set(self.world.outside.drivers.drivers.values()) == {"iavf"}
        self.world.close()
        shutil.rmtree(self.directory)

    def check(self) -> None:
        running = [device.claim for spec in self.world.outside.vms.running() for device in spec.granted.passthrough]
        assert len(running) == len(set(running)), "two VMs that run have one device"
        held = [claim for container in self.world.records.containers.all() for claim in container.claims]
        assert len(held) == len(set(held)), "two records claim one device"
        assert set(running) <= set(held), "a VM runs with a device that is free for others"
        drivers = self.world.outside.drivers.drivers
        assert all(drivers[claim.removeprefix("pci:")] == "vfio-pci" for claim in running), "its driver took it back"

    def create(self, pick: int, which: int) -> None:
        node = list(NODES)[which % 2]
        self.attempt += 1
        sandbox = self.world.run(PODS[pick % 3], attempt=pick // 3 % 2)
        self.world.create(sandbox, attempt=self.attempt, config=container_config(devices=(CriDevice(node, node),)))

    def chosen(self, pick: int, *phases: ContainerPhase) -> list[Container]:
        there = [c for c in self.world.records.containers.all() if c.phase in phases]
        return [there[pick % len(there)]] if there else []

    def start(self, pick: int, which: int) -> None:
        for container in self.chosen(pick, ContainerPhase.CREATED):
            self.world.do.start_container.start(container)

    def stop(self, pick: int, which: int) -> None:
        for container in self.chosen(pick, ContainerPhase.RUNNING, ContainerPhase.CREATED):
            self.world.do.stop_container.stop(container, 0)

    def exit(self, pick: int, which: int) -> None:
        for container in self.chosen(pick, ContainerPhase.RUNNING):
            self.world.outside.vms.end(self.world.domain(container.id), OffReason.SHUTDOWN)
            if which:
                self.world.outside.vms.deliver()

    def remove(self, pick: int, which: int) -> None:
        for container in self.chosen(pick, *ContainerPhase):
            self.world.do.remove_container.remove(container)

    def stop_pod(self, pick: int, which: int) -> None:
        for sandbox in self.world.records.sandboxes.all()[pick % 3 :][:1]:
            self.world.stop_sandbox(sandbox.id)

    def remove_pod(self, pick: int, which: int) -> None:
        for sandbox in self.world.records.sandboxes.all()[pick % 3 :][:1]:
            self.world.remove_sandbox(sandbox.id)

    def fail_next(self, pick: int, which: int) -> None:
        call = _CALLS[pick % len(_CALLS)]
        self.world.journal.fail(call, InternalError("no"), after=bool(which))

    def die_soon(self, pick: int, which: int) -> None:
        self.world.journal.crash(1 + pick, list(When)[which % 3])

    def again(self) -> None:
        """Starts the next daemon after this one has died."""
        self.world = self.world.recovered()


STEPS = ("create", "start", "stop", "exit", "remove", "stop_pod", "remove_pod", "fail_next", "die_soon")
# Most steps make and start.
STEP = st.tuples(st.sampled_from((*STEPS, "create", "create", "start", "start")), st.integers(0, 11), st.integers(0, 2))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEP, max_size=25))
def test_no_two_running_vms_ever_have_the_same_device(steps: list[tuple[str, int, int]]) -> None:
    node = Node()
    for name, pick, which in steps:
        try:
            with contextlib.suppress(ShimError):
                getattr(node, name)(pick, which)
        except Crash:
            node.again()
        node.check()
    node.again()
    node.check()
    node.end()
