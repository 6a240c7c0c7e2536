"""Pods of a VM that outlives them, one after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.world import World, sandbox_config

from virtshim.model.container import ContainerPhase
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import PodKey
from virtshim.model.vm import Power
from virtshim.moves.values import VmRecord

LASTING = sandbox_config(annotations={"virtshim.io/vm": "db", "virtshim.io/on-stop": "save"})


def pod(world: World, number: int = 1) -> SandboxId:
    """The VM's next pod: a StatefulSet's controller gives it another UID."""
    if not world.records.images.all():
        world.pull()
    key = PodKey("default", "db-0", f"uid-{number}", 0)
    return world.do.run_sandbox.run(key, LASTING, world.deadline())


def running(world: World, number: int = 1) -> ContainerId:
    """Its guest has booted its kernel, so there is something to save."""
    container = world.create(pod(world, number))
    world.start(container)
    return container


def vm(world: World) -> VmRecord:
    (found,) = world.app.adapters.files.vms.all()
    return found


def memory(world: World) -> Path:
    return Path(world.app.adapters.files.vms.memory(vm(world).disk))


def logged(world: World) -> list[str]:
    return [line for log in world.outside.consoles.logs.values() for line in log]


def state_of(world: World, container: ContainerId) -> tuple[ContainerPhase, Power]:
    return world.container(container).phase, world.outside.vms.power(world.domain(container)).power


def steps_of(make_world: Callable[[], World], do: Callable[[World], Any], prepare: Callable[[World], Any]) -> int:
    """How many calls to the outside `do` makes, without those of `prepare`, with which it begins."""
    world: World = make_world()
    prepare(world)
    before = len(world.journal.calls)
    world.close()
    world = make_world()
    do(world)
    count = len(world.journal.calls) - before
    world.close()
    return count
