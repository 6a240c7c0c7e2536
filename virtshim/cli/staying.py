"""VMs that stay: `virtshim run -d`, start, stop, restart, rm.

Such a VM outlives its pods (`virtshim.io/vm`), so its disk stays while it is stopped. Each start makes a pod, whose annotation
keeps what the user wanted of the VM. The former pod is removed only after that, so at each moment a pod has the annotation.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

from virtshim.annotations.parse import VM_ANNOTATION
from virtshim.cli.pulling import pull
from virtshim.cli.run import Signals
from virtshim.cri.client import CONTAINER, NodeClient, WantedVm, connected, pods_of, running_vm_of, stop_vm_of_run
from virtshim.cri.operator_client import LastingVm, operating
from virtshim.model.errors import InvalidRequest, ShimError, WrongState


def run_detached(socket: str, admin: str, wanted: WantedVm, *, always_pull: bool, quiet: bool) -> str:
    """Returns the VM's id. If it does not start, or after a signal, nothing is left."""
    if VM_ANNOTATION in (wanted.annotations or {}):
        raise InvalidRequest(f"--annotation {VM_ANNOTATION} is not possible with -d; --name names the VM")
    wanted = dataclasses.replace(
        wanted, stays=True, annotations={**(wanted.annotations or {}), VM_ANNOTATION: wanted.name}
    )
    signals = Signals()
    with signals.caught(), connected(socket) as node:
        if any(pod.name == wanted.name for pod in node.made_by_run()):
            raise InvalidRequest(
                f"there is a VM {wanted.name} already: `virtshim start {wanted.name}` starts it, and `virtshim rm "
                f"{wanted.name}` removes it; or choose another --name"
            )
        if _kept(admin, wanted):
            raise InvalidRequest(
                f"a disk of a VM {wanted.name} is kept on this node already: `virtshim vms` lists it, and `virtshim vms rm` "
                "removes it; or choose another --name"
            )
        if always_pull or not node.image_id(wanted.image):
            pull(socket, admin, wanted.image, quiet=quiet)
        mark = secrets.token_hex(16)
        try:
            with signals.shield():
                return _made(node, wanted, mark, 0)[1]
        except (ShimError, SystemExit):
            node.remove_marked(mark)
            _forget_disk(admin, wanted)
            raise


def start(socket: str, name: str) -> str:
    """Returns the VM's id. No error if it runs already."""
    signals = Signals()
    with signals.caught(), signals.shield(), connected(socket) as node:
        pods = pods_of(node, name)
        last = pods[0]
        if (vm := running_vm_of(node, pods)) is not None:
            return vm.id
        if last.wanted is None:
            raise WrongState(f"VM {name} was made by `virtshim run` without -d, so it ends with that command")
        for pod in pods:
            node.stop_pod(pod.id)
        new, made = _made(node, last.wanted, last.mark, last.attempt + 1)
        node.remove_marked(last.mark, but=new)
        return made


def _made(node: NodeClient, wanted: WantedVm, mark: str, attempt: int) -> tuple[str, str]:
    """The ids of a new pod and of the VM in it. Removes the pod if the VM does not start."""
    pod = node.make_pod(wanted, mark, attempt)
    try:
        return pod, node.start_vm(pod, wanted, mark, attempt)
    except ShimError:
        if not any(vm.pod == pod and vm.state == "running" for vm in node.vms()):  # another `start` may have been first
            node.remove_pod(pod)
        raise


def stop(socket: str, name: str, seconds: int) -> None:
    """Shuts the guest down, within `seconds`. No error if it has ended."""
    if seconds < 0:
        raise InvalidRequest(f"--seconds {seconds}: must be a number of seconds")
    with connected(socket) as node:
        stop_vm_of_run(node, name, seconds)


def remove(socket: str, admin: str, name: str, *, force: bool) -> None:
    """Removes the VM with its disk."""
    with connected(socket) as node:
        pods = pods_of(node, name)
        if not force and running_vm_of(node, pods) is not None:
            raise WrongState(f"VM {name} runs; stop it first, or remove it with --force")
        node.remove_marked(pods[0].mark)
    if (wanted := pods[0].wanted) is not None:
        _forget_disk(admin, wanted)


def _kept(admin: str, wanted: WantedVm) -> Sequence[LastingVm]:
    """The kept disk of the wanted VM, if there is one. A VM of Kubernetes with the same name has another container name."""
    identity = (wanted.namespace, wanted.name, CONTAINER)
    with operating(admin) as operator:
        return [vm for vm in operator.lasting_vms() if (vm.namespace, vm.name, vm.container) == identity]


def _forget_disk(admin: str, wanted: WantedVm) -> None:
    for vm in _kept(admin, wanted):
        with operating(admin) as operator:
            operator.remove_vm(vm)
