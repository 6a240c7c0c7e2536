"""What is left to the operator's hands after set-up, and after it was taken back: commands, in order. Pure.

Labels and taints are the cluster's: kubelet gives its own only to a node that registers for the first time, and takes none away.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from virtshim.neighbours.kubelet import KubeletSetup
from virtshim.preflight.overhead import RUNTIME_CLASS
from virtshim.setup.facts import NodeFacts
from virtshim.setup.kubelet_plan import LABEL, TAINT, of_vms_only


def after_set_up(facts: NodeFacts, name: str, socket: str, *, had_taint: bool, forbids: bool = False) -> list[str]:
    """`socket`: what kubelet asks from now on; `had_taint`: the set-up before made a node of VMs alone; `forbids`: the operator
    has said which networks images do not come from."""
    steps = ["virtshim check"]
    kubelet = facts.kubelet
    if facts.networks and not forbids:
        missing = (
            f"add the network of the cluster's services, which has {facts.unknown_service} and is in no file of this node; "
            if facts.unknown_service
            else ""
        )
        steps.append(
            f"images.forbidden_networks = {json.dumps(facts.networks)}   # these are the cluster's: without it pods' authors can "
            f"make the node ask there for images; {missing}leave out those that have your registries"
        )
    if not kubelet.is_there:
        return [*steps, f"when kubelet is installed: virtshim setup, once more; kubeadm: --cri-socket unix://{socket}"]
    node, alone = _name(kubelet, name), facts.runtime is None
    if not facts.cni_configuration:
        steps.append("install the cluster's network add-on: there is no CNI configuration yet")
    if alone and kubelet.is_in_cluster:
        steps.append(
            f"kubectl drain {node} --ignore-daemonsets --delete-emptydir-data   # all its pods are VMs from now on"
        )
    # A flag of kubelet's would win over the taint of its drop-in.
    if alone and (kubelet.is_in_cluster or "register-with-taints" in kubelet.flags):
        steps.append(
            f"kubectl taint nodes {node} {TAINT}=true:NoSchedule --overwrite   # kubelet taints a node only when it is new"
        )
    elif not alone and had_taint:
        steps.append(_untaint(node))
    steps.append("systemctl daemon-reload && systemctl restart kubelet")
    if not kubelet.is_in_cluster:
        steps.append(f"kubeadm join, if that brings it into the cluster, with --cri-socket unix://{socket}")
    steps.append(f"kubectl label node {node} {LABEL}")
    if alone and kubelet.is_in_cluster:
        steps.append(f"kubectl uncordon {node}")
    return [*steps, f"kubectl apply -f {RUNTIME_CLASS}   # once a cluster"]


def after_undo(
    facts: NodeFacts, name: str, known: Collection[str], gone: Collection[str], activated: Sequence[str]
) -> list[str]:
    """`known`: paths of all that was set-up's; `gone`: of those that were taken back; `activated`: sockets of the operator's that
    would start again what was stopped."""
    steps = []
    if facts.kubelet.is_in_cluster:
        node = _name(facts.kubelet, name)
        steps.append(
            f"kubectl label node {node} {TAINT}-   # it stays in the cluster otherwise, and brings pods of VMs here"
        )
        if of_vms_only(known):
            steps.append(_untaint(node))
    if any("kubelet" in path for path in gone):
        steps.append("systemctl restart kubelet   # it asks the runtime that it asked before")
    return [*steps, *(f"systemctl disable --now {unit}   # yours: it starts what was stopped" for unit in activated)]


def _untaint(node: str) -> str:
    return f"kubectl taint nodes {node} {TAINT}-   # it stays in the cluster otherwise, and keeps other pods away"


def _name(kubelet: KubeletSetup, name: str) -> str:
    """By which the cluster knows the node."""
    said = kubelet.flags.get("hostname-override")
    return str(said.value) if said else name
