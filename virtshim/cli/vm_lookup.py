"""Finds the VM that the user names: by a pod's name, namespace/name, or the first characters of an id. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from virtshim.cri.client import PodSummary, VmSummary
from virtshim.model.errors import InvalidRequest, NotFound, WrongState

_SHORT = 12
_Seen = TypeVar("_Seen", bound=PodSummary | VmSummary)


def running_vm(wanted: str, pods: Sequence[PodSummary], vms: Sequence[VmSummary]) -> VmSummary:
    """Like `vm_of`, but the VM must run. Raises NotFound, InvalidRequest if several match, WrongState."""
    vm = vm_of(wanted, pods, vms)
    if vm.state != "running":
        raise WrongState(f"container {vm.name} ({vm.id[:_SHORT]}) is {vm.state}, not running")
    return vm


def vm_of(wanted: str, pods: Sequence[PodSummary], vms: Sequence[VmSummary]) -> VmSummary:
    """The VM that `wanted` names, also one that has ended: the pod's running VM, or else its newest. Names win over ids. Among
    pods of the same name a ready one wins, because a pod's earlier sandboxes share its name. Raises NotFound,
    InvalidRequest if several match, WrongState if the pod has no VM."""
    if not wanted:
        raise InvalidRequest("the name is empty; write a pod's name, namespace/name, or the first characters of an id")
    if named := [pod for pod in pods if wanted in (pod.name, f"{pod.namespace}/{pod.name}")]:
        ready = [pod for pod in named if pod.is_ready] or named[:1]
        return _of_pod(_only(wanted, ready, (f"{pod.namespace}/{pod.name} ({pod.id[:_SHORT]})" for pod in ready)), vms)
    found: list[PodSummary | VmSummary] = [*(vm for vm in vms if vm.id.startswith(wanted))]
    found += [pod for pod in pods if pod.id.startswith(wanted)]
    if not found:
        raise NotFound(f"no pod or container {wanted!r} is on this node; `virtshim ps` lists them")
    one = _only(wanted, found, (seen.id[:_SHORT] for seen in found))
    return _of_pod(one, vms) if isinstance(one, PodSummary) else one


def _only(wanted: str, found: Sequence[_Seen], names: Iterable[str]) -> _Seen:
    if len(found) > 1:
        raise InvalidRequest(f"{wanted!r} matches more than one: {', '.join(names)}; be more specific")
    return found[0]


def _of_pod(pod: PodSummary, vms: Iterable[VmSummary]) -> VmSummary:
    own = [vm for vm in vms if vm.pod == pod.id]
    if not own:
        raise WrongState(f"pod {pod.namespace}/{pod.name} has no VM")
    return next((vm for vm in own if vm.state == "running"), own[0])
