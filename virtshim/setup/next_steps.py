"""The steps that remain for the operator after setup, and after `setup --undo`, in order. Pure.

Labels and taints belong to the cluster: kubelet sets its own only when the node registers for the first time, and never removes
any.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from virtshim.neighbours.kubelet import KubeletSetup
from virtshim.preflight.overhead import RUNTIME_CLASS
from virtshim.setup.facts import NodeFacts
from virtshim.setup.kubelet_plan import LABEL, TAINT, of_vms_only


def after_set_up(facts: NodeFacts, name: str, socket: str, *, had_taint: bool, forbids: bool = False) -> list[str]:
    """`socket`: the socket that kubelet will call. `had_taint`: the previous setup made a node that runs only VMs. `forbids`: the
    operator has already set images.forbidden_networks."""
    steps = ["virtshim check"]
    kubelet = facts.kubelet
    if facts.networks and not forbids:
        missing = (
            f"add the network of the cluster's services, which contains {facts.unknown_service} and is in no file of this node; "
            if facts.unknown_service
            else ""
        )
        steps.append(
            f"images.forbidden_networks = {json.dumps(facts.networks)}   # the cluster's networks: without this setting, pods' "
            f"authors can make the node fetch images from them; {missing}leave out networks of your registries"
        )
    if not kubelet.is_there:
        return [
            *steps,
            f"when kubelet is installed, run virtshim setup again; for kubeadm, use --cri-socket unix://{socket}",
        ]
    node, alone = _name(kubelet, name), facts.runtime is None
    if not facts.cni_configuration:
        steps.append("install the cluster's network add-on, because there is no CNI configuration yet")
    if alone and kubelet.is_in_cluster:
        steps.append(
            f"kubectl drain {node} --ignore-daemonsets --delete-emptydir-data   # from now on, all pods of this node are VMs"
        )
    # The flag takes precedence over the taint in the drop-in.
    if alone and (kubelet.is_in_cluster or "register-with-taints" in kubelet.flags):
        steps.append(
            f"kubectl taint nodes {node} {TAINT}=true:NoSchedule --overwrite   # kubelet taints only new nodes"
        )
    elif not alone and had_taint:
        steps.append(_untaint(node))
    steps.append("systemctl daemon-reload && systemctl restart kubelet" if facts.systemd_runs else "restart kubelet")
    if not kubelet.is_in_cluster:
        steps.append(f"if the node joins the cluster with kubeadm join, use --cri-socket unix://{socket}")
    steps.append(f"kubectl label node {node} {LABEL}")
    if alone and kubelet.is_in_cluster:
        steps.append(f"kubectl uncordon {node}")
    return [*steps, f"kubectl apply -f {RUNTIME_CLASS}   # once per cluster"]


def after_undo(
    facts: NodeFacts, name: str, known: Collection[str], gone: Collection[str], activated: Sequence[str]
) -> list[str]:
    """`known`: paths of all files that setup wrote. `gone`: those that were reverted. `activated`: sockets that the operator
    enabled, and that would restart a stopped service."""
    steps = []
    if facts.kubelet.is_in_cluster:
        node = _name(facts.kubelet, name)
        steps.append(
            f"kubectl label node {node} {TAINT}-   # otherwise the label stays in the cluster and attracts pods of VMs"
        )
        if of_vms_only(known):
            steps.append(_untaint(node))
    if any("kubelet" in path for path in gone):
        restart = "systemctl restart kubelet" if facts.systemd_runs else "restart kubelet"
        steps.append(f"{restart}   # kubelet calls its former runtime again")
    return [
        *steps,
        *(
            f"systemctl disable --now {unit}   # you enabled this socket; it would restart the service"
            for unit in activated
        ),
    ]


def _untaint(node: str) -> str:
    return f"kubectl taint nodes {node} {TAINT}-   # otherwise the taint stays in the cluster and keeps other pods away"


def _name(kubelet: KubeletSetup, name: str) -> str:
    """The node's name in the cluster."""
    said = kubelet.flags.get("hostname-override")
    return str(said.value) if said else name
