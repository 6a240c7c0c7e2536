"""Runs a pod's manifest without a cluster: calls a node's CRI socket as kubelet would. For the tutorial and for trying things.

    python deploy/pod.py apply FILE      makes and starts the pods of a manifest
    python deploy/pod.py logs NAME       shows the log of a pod's container
    python deploy/pod.py delete NAME     stops and removes a pod

The socket is CONTAINER_RUNTIME_ENDPOINT. It reads of a manifest metadata, runtimeClassName, and one container's name, image,
imagePullPolicy, command, env and memory limit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import grpc  # noqa: E402
import yaml  # noqa: E402
from podclient import PodClient, container_config, pod_config  # noqa: E402

from virtshim.model.text import parse_bytes  # noqa: E402

_GRACE = 30


def apply(node: PodClient, manifest: Any) -> None:
    meta, (spec,) = manifest["metadata"], manifest["spec"]["containers"]
    name = meta["name"]
    config = pod_config(name, f"{_logs()}/{name}", meta.get("annotations", {}))
    pod = node.run_pod(config, manifest["spec"].get("runtimeClassName", ""))
    image = spec["image"] if spec.get("imagePullPolicy") == "Never" else node.pull(spec["image"])
    wanted = container_config(image, parse_bytes(spec["resources"]["limits"]["memory"]), spec["name"])
    wanted.stdin = True
    wanted.command.extend(spec.get("command", ()))
    for one in spec.get("env", ()):
        wanted.envs.add(key=one["name"], value=str(one["value"]).encode())
    node.start(node.create(pod, wanted, config))
    print(f"pod {name} runs, address {node.pod_ip(pod)}")


def delete(node: PodClient, name: str) -> None:
    pod = _pod(node, name)
    for container in node.containers():
        if container.pod_sandbox_id == pod:
            node.stop(container.id, _GRACE)
    node.stop_pod(pod)
    node.remove_pod(pod)
    print(f"pod {name} is gone")


def logs(node: PodClient, name: str) -> None:
    pod = _pod(node, name)
    for container in node.containers():
        if container.pod_sandbox_id == pod:
            for line in Path(node.status(container.id).log_path).read_text(errors="replace").splitlines():
                print(line.split(" ", 3)[-1])


def _pod(node: PodClient, name: str) -> str:
    found = [pod.id for pod in node.pods() if pod.metadata.name == name]
    return found[0] if found else sys.exit(f"no pod {name} is on this node; `virtshim ps` lists them")


def _socket() -> str:
    return os.environ.get("CONTAINER_RUNTIME_ENDPOINT", "/run/virtshim/virtshim.sock").removeprefix("unix://")


def _logs() -> str:
    """Beside the socket's directory, as a node of `up` has its others."""
    return os.path.join(os.path.dirname(os.path.dirname(_socket())), "pod-logs")


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("apply", "delete", "logs"):
        sys.exit(str(__doc__))
    verb, what = sys.argv[1:]
    try:
        with PodClient(_socket()) as node:
            if verb == "apply":
                for manifest in yaml.safe_load_all(Path(what).read_text(encoding="utf-8")):
                    apply(node, manifest)
            elif verb == "logs":
                logs(node, what)
            else:
                delete(node, what)
    except grpc.RpcError as exc:
        sys.exit(f"the node refused: {exc.details()}")


if __name__ == "__main__":
    main()
