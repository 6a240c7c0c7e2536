"""The pods that `virtshim run` made for one VM, and the VM's stop. For the command line and the dashboard."""

from __future__ import annotations

from collections.abc import Sequence

from virtshim.cri.client import MadePod, NodeClient, VmSummary
from virtshim.model.errors import NotFound, WrongState


def pods_of(node: NodeClient, name: str) -> Sequence[MadePod]:
    """The pods of a VM, newest first. `name`: the VM's name, namespace/name, or the id of one of its pods. Raises NotFound, and
    WrongState for a pod that kubelet made."""
    made = node.made_by_run()
    newest = next((pod for pod in made if name in (pod.name, f"{pod.namespace}/{pod.name}", pod.id)), None)
    if newest is not None:
        return [pod for pod in made if pod.mark == newest.mark]
    if any(name in (pod.name, f"{pod.namespace}/{pod.name}", pod.id) for pod in node.pods()):
        raise WrongState(
            f"pod {name} was not made by `virtshim run`; kubectl starts, stops and removes pods of Kubernetes"
        )
    raise NotFound(f"no VM {name!r} was made by `virtshim run -d`; `virtshim ps` lists the VMs of this node")


def running_vm_of(node: NodeClient, pods: Sequence[MadePod]) -> VmSummary | None:
    ids = {pod.id for pod in pods}
    return next((vm for vm in node.vms() if vm.pod in ids and vm.state == "running"), None)


def stop_vm_of_run(node: NodeClient, name: str, seconds: int) -> None:
    """Shuts the guest down, within `seconds`. `name`: as for `pods_of`. No error if it has ended."""
    pods = pods_of(node, name)
    if (vm := running_vm_of(node, pods)) is not None:
        node.stop_vm(vm.id, seconds)
    for pod in pods:
        node.stop_pod(pod.id)
