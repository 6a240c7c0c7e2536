"""Which of a pod's containers may be its virtual machine now: there is one, so containers run one after another. Pure.

CRI does not say what kind a container is. kubelet's pod-resources list does, in part: it has the pod's own containers (regular
ones and native sidecars) before the sandbox is made, and never init containers or ephemeral ones. So nothing has to be guessed
from the order of kubelet's calls, and nothing is remembered: kubelet begins with the first init container in each new sandbox,
runs all of them again in the same one (RestartAllContainers), and asks for an ephemeral container before an init container.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from virtshim.domain.container import Container, ContainerName
from virtshim.domain.errors import WrongState

_INSTEAD = (
    "Put a second one (a sidecar, also an injected one) into a pod of its own, or run what it runs inside the guest"
)
_DEBUG = "use kubectl exec, or kubectl attach for the console"


def refuse_another(wanted: ContainerName, own: Sequence[str] | None, there: Iterable[Container]) -> None:
    """WrongState if the container cannot run in this pod, or not now. `own`: what kubelet lists, None if that is not known.
    `there`: the containers of this sandbox."""
    name = _quoted(wanted.name)
    cannot = f"container {name} cannot run in this pod: a pod is one virtual machine"
    if own is not None and len(own) > 1:
        raise WrongState(
            f"{cannot}, and this one has {len(own)} containers ({', '.join(map(_quoted, own))}; native sidecars count, init "
            f"containers that end do not). {_INSTEAD}"
        )
    known = [other for other in there if not other.was_never_created]
    running = next((other for other in known if other.is_running), None)
    if running is not None and running.name.name == wanted.name:
        raise WrongState(f"container {running.id} ({running.name}) runs in this pod; stop it first")
    is_own = own is not None and wanted.name in own
    if own is not None and not is_own:
        # kubelet begins no init container in a sandbox that has the pod's own on record, even if that has ended.
        before = running or next((other for other in known if other.name.name in own), None)
        if before is not None:
            what = "runs in it" if before.is_running else "is it"
            raise WrongState(
                f"{cannot}, and container {_quoted(before.name.name)} ({before.id}) {what}. {name} is an ephemeral container "
                f"(kubectl debug), or an init container that is not due: {_DEBUG}"
            )
    elif running is not None:
        beside = f"{cannot}, and container {_quoted(running.name.name)} ({running.id}) runs in it"
        if is_own:  # no init container: kubelet asks for the pod's own when they have ended
            raise WrongState(
                f"{beside}, an ephemeral container (kubectl debug). Shut its guest down, or stop it with crictl stop; kubelet "
                f"then starts {name}"
            )
        raise WrongState(f"{beside}. {_INSTEAD}; an ephemeral container (kubectl debug) cannot run: {_DEBUG}")


def _quoted(name: str) -> str:
    return repr(name[:80])
