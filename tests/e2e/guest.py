"""Boots the demo guest as a pod and talks to it."""

from __future__ import annotations

import os
import subprocess
import uuid

import grpc
from console import SerialConsole
from node import Node
from podclient import PodClient, container_config, pod_config, wait_for_log

from criproto.runtime_v1 import api_pb2 as pb

# Seconds; a quiet machine needs five.
BOOT = 180.0
READY = "virtshim-guest: ready"


def boot(cri: PodClient, node: Node, image: str, name: str = "web", **options: object) -> tuple[str, str, str]:
    """Boots a VM; returns sandbox id, container id and log file once the guest is up."""
    # A directory of its own: an earlier pod's log would say "ready" for it.
    config = pod_config(name, f"{node.directory}/logs/{name}-{uuid.uuid4().hex[:8]}", **options)
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(cri.pull(image)), config)
    cri.start(container)
    log = cri.status(container).log_path
    assert os.path.exists(log), "the log file must be there when StartContainer returns"
    wait_for_log(log, READY, BOOT)
    return pod, container, log


def ping(address: str) -> bool:
    """Whether the guest answers within 10 s: it reports readiness a moment before its NIC has passed the bridge's ports."""
    command = ["ping", "-c", "1", "-w", "10", "-i", "0.5", address]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def console_of(node: Node, container: str) -> SerialConsole:
    return SerialConsole(f"{node.directory}/run/vm/{container[:20]}/console.sock")


def console_of_pod(cri: PodClient, node: Node, pod: str) -> SerialConsole:
    (container,) = [c.id for c in cri.containers() if c.pod_sandbox_id == pod]
    return console_of(node, container)


def answers(cri: PodClient) -> bool:
    """Whether the CRI socket serves."""
    try:
        cri.runtime.Status(pb.StatusRequest(), timeout=2)
    except grpc.RpcError:
        return False
    return True
