"""Runs in the machine, with the package's own Python, and makes a VM through the CRI socket as kubelet with systemd's
driver does.

in_the_machine.py run     pulls the image that is beside this file, makes pod and VM, waits until its guest is up
in_the_machine.py keep    the same, for a VM that outlives its pods and that a stop saves
in_the_machine.py go_on   that VM's next pod
in_the_machine.py show    what the runtime says of pods and VMs, as JSON
in_the_machine.py remove  ends and removes all of them"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from imageserver import serve_directory
from podclient import PodClient, container_config, pod_config, wait_for_log

from criproto.runtime_v1 import api_pb2 as pb

SOCKET = "/run/virtshim/virtshim.sock"
POD_SLICE = "kubepods-burstable-pod1234.slice"
_PATIENCE = 900.0


def run(node: PodClient) -> None:
    started = _start(node, pod_config("vm", "/var/log/pods/vm"))
    wait_for_log(node.status(started).log_path, "virtshim-guest: ready", _PATIENCE)


def keep(node: PodClient) -> None:
    wait_for_log(node.status(go_on(node)).log_path, "virtshim-guest: ready", _PATIENCE)


def go_on(node: PodClient) -> str:
    saved = {"virtshim.io/vm": "by-pod-name", "virtshim.io/on-stop": "save"}
    return _start(node, pod_config("kept", "/var/log/pods/kept", saved))


def _start(node: PodClient, wanted: pb.PodSandboxConfig) -> str:
    here = Path(__file__).resolve().parent
    with serve_directory(here) as url:
        image = node.pull(f"{url.removeprefix('http://')}/guest.qcow2")
    wanted.linux.cgroup_parent = f"/kubepods.slice/kubepods-burstable.slice/{POD_SLICE}"
    wanted.linux.overhead.memory_limit_in_bytes = 256 << 20
    pod = node.run_pod(wanted)
    container = node.create(pod, container_config(image), wanted)
    node.start(container)
    return container


def show(node: PodClient) -> None:
    pods = [
        {
            "id": one.id,
            "name": one.metadata.name,
            "state": int(one.state),
            "address": node.pod_status(one.id).network.ip,
        }
        for one in node.pods()
    ]
    containers: list[dict[str, Any]] = []
    for one in node.containers():
        said = node.status(one.id)
        containers.append({
            "id": one.id, "pod": one.pod_sandbox_id, "state": int(said.state), "started": said.started_at, "code": said.exit_code,
            "reason": said.reason, "message": said.message, "log": said.log_path,
        })  # fmt: skip
    print(json.dumps({"pods": pods, "containers": containers}))


def remove(node: PodClient) -> None:
    for container in node.containers():
        node.stop(container.id, 60)
        node.remove(container.id)
    for pod in node.pods():
        node.stop_pod(pod.id)
        node.remove_pod(pod.id)


if __name__ == "__main__":
    with PodClient(SOCKET, _PATIENCE) as client:
        {"run": run, "keep": keep, "go_on": go_on, "show": show, "remove": remove}[sys.argv[1]](client)
