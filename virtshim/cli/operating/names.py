"""Names of pods, for a shell that completes them."""

from __future__ import annotations

from collections.abc import Iterable

from virtshim.domain.errors import ShimError


def pod_names(incomplete: str) -> Iterable[str]:
    """Those of this node's pods that begin so, alone where that is enough; none if the node does not answer."""
    import os

    from virtshim import config as settings
    from virtshim.cri.client import connected

    try:
        socket = os.environ.get("CONTAINER_RUNTIME_ENDPOINT", "") or settings.load(None).cri_socket
        with connected(socket.removeprefix("unix://")) as node:
            pods = node.pods()
    except (ShimError, OSError):
        return []
    names = [pod.name for pod in pods]
    full = {f"{pod.namespace}/{pod.name}" for pod in pods}
    shown = {name for name in names if names.count(name) == 1} | full
    return sorted(name for name in shown if name.startswith(incomplete))
