"""Which of a pod's containers the pod is: one virtual machine is one container, and its identity must not change hands. Pure.

CRI does not tell init containers from others, but kubelet's order does: it asks for what follows an init container when that has
succeeded, and never begins one again that has. So the pod is the container beside which another one is asked for, or after whose
failure, and the one that is begun again after a success. From then on every other name is refused, whatever has ended meanwhile:
else a second container, which kubelet asks for again and again, would boot in the first one's place.
"""

from __future__ import annotations

from collections.abc import Iterable

from virtshim.domain.container import Container, ContainerName, ContainerPhase
from virtshim.domain.sandbox import Sandbox


def sole_container(sandbox: Sandbox, wanted: ContainerName, there: Iterable[Container]) -> str:
    """Its name, "" as long as that is not sure. `there`: the containers of this sandbox."""
    if sandbox.sole_container:
        return sandbox.sole_container
    latest: dict[str, Container] = {}
    for container in sorted(there, key=lambda container: container.name.attempt):
        if container.phase is not ContainerPhase.CREATED and not container.was_never_created:
            latest[container.name.name] = container
    for name, container in latest.items():
        if (name == wanted.name) == _has_succeeded(container) and container.name != wanted:
            return name
    return ""


def why_refused(wanted: ContainerName, sole: str) -> str:
    return (
        f"container {wanted.name[:80]!r} cannot run in this pod: a pod is one virtual machine, and this one is that of "
        f"container {sole[:80]!r}. Put the other (a sidecar, also an injected or a native one; an ephemeral container) into a "
        "pod of its own, or run what it runs inside the guest; init containers run before, one after another"
    )


def _has_succeeded(container: Container) -> bool:
    return container.exit is not None and container.exit.code == 0
