"""Pods whose sandbox another runtime made, as `virtshim proxy` passes them to virtshim."""

from __future__ import annotations

from typing import Any

from fakes.world import World, pod_key, sandbox_config

from virtshim.model.container import Resources
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.sandbox import Adoption, SandboxConfig

HANDLER = "virtshim-pod"
# The other runtime's sandbox.
SANDBOX = SandboxId("c0de" * 16)
NETNS = "/var/run/netns/cni-1"
CGROUP = "/kubepods/pod1"
ADOPTION = Adoption(NETNS, ("10.88.7.7", "fd00::7"))


def shared_config(**changes: Any) -> SandboxConfig:
    """What kubelet says of such a pod."""
    pod = {"runtime_handler": HANDLER, "cgroup_parent": CGROUP, "overhead": Resources(memory_limit_bytes=512 << 20)}
    return sandbox_config(**(pod | changes))


def adopt(
    world: World, own: SandboxId = SANDBOX, attempt: int = 0, to: Adoption = ADOPTION, **changes: Any
) -> SandboxId:
    services = world.app.operator.services
    services.adopt_sandbox.adopt(own, pod_key("web", attempt), shared_config(**changes), to, world.deadline())
    return own


def running(world: World, own: SandboxId = SANDBOX, attempt: int = 0, **changes: Any) -> ContainerId:
    """A VM that runs in an adopted sandbox."""
    if not world.records.images.all():
        world.pull()
    container = world.create(adopt(world, own, attempt, **changes))
    world.start(container)
    return container
