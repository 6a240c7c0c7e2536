"""`virtshim ps`: the node's pods and their VMs, one line a VM."""

from __future__ import annotations

import time

from virtshim.cli.operating.tables import show, show_json
from virtshim.cli.ps import HEAD, rows
from virtshim.cri.client import connected


def ps(socket: str, *, as_json: bool = False) -> None:
    with connected(socket) as node:
        pods, vms = node.pods(), node.vms()
        addresses = {pod.id: node.addresses(pod.id) for pod in pods}
    if not as_json:
        show(HEAD, rows(pods, vms, addresses, time.time()))
        return
    show_json(
        [
            {
                "id": pod.id,
                "namespace": pod.namespace,
                "name": pod.name,
                "ready": pod.is_ready,
                "addresses": addresses[pod.id],
                "createdAt": pod.created,
                "vms": [
                    {
                        "id": vm.id,
                        "name": vm.name,
                        "attempt": vm.attempt,
                        "state": vm.state,
                        "image": vm.image,
                        "createdAt": vm.created,
                    }
                    for vm in vms
                    if vm.pod == pod.id
                ],
            }
            for pod in pods
        ]
    )
