"""A kubectl without an API server: a node's CRI socket and its streaming server answer what `kubectl virt` asks.

`python kubectl_of_a_node.py SOCKET get pod NAME -o json`, `attach pod/NAME ...`, `port-forward ... pod/NAME :PORT`"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading

from podclient import PodClient

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cli.sessions import relay
from virtshim.cli.vnc import copy_both_ways
from virtshim.streaming import client as streaming


def main(cri_socket: str, words: list[str]) -> int:
    verb = words[0]
    name = next(
        word for word in words[1:] if word.startswith("pod/") or (verb == "get" and word != "pod")
    ).removeprefix("pod/")
    with PodClient(cri_socket) as cri:
        (pod,) = [one for one in cri.pods() if one.metadata.name == name]
        (container,) = [one for one in cri.containers() if one.pod_sandbox_id == pod.id]
        if verb == "get":
            print(json.dumps(as_json(cri, pod, container)))
            return 0
        if verb == "attach":
            tty, stdin = "-t" in words, "-i" in words
            request = pb.AttachRequest(container_id=container.id, stdin=stdin, stdout=True, stderr=not tty, tty=tty)
            with contextlib.closing(streaming.connect(cri.runtime.Attach(request, timeout=60).url)) as client:
                return relay(client, stdin=stdin, is_terminal=tty)
        return forward(cri, pod.id, int(words[-1].rpartition(":")[2]))


def as_json(cri: PodClient, pod: pb.PodSandbox, container: pb.Container) -> object:
    info = cri.runtime.PodSandboxStatus(pb.PodSandboxStatusRequest(pod_sandbox_id=pod.id), timeout=60).status
    metadata = {
        "name": pod.metadata.name, "namespace": pod.metadata.namespace, "uid": pod.metadata.uid,
        "annotations": dict(info.annotations),
    }  # fmt: skip
    running = container.state == pb.CONTAINER_RUNNING
    spec = {"containers": [{"name": container.metadata.name, "stdin": True, "tty": False}]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running" if running else "Pending"}}


def forward(cri: PodClient, pod: str, port: int) -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"Forwarding from 127.0.0.1:{server.getsockname()[1]} -> {port}", flush=True)
        while True:
            local, _ = server.accept()
            threading.Thread(target=serve, args=(cri, pod, port, local), daemon=True).start()


def serve(cri: PodClient, pod: str, port: int, local: socket.socket) -> None:
    url = cri.runtime.PortForward(pb.PortForwardRequest(pod_sandbox_id=pod, port=[port]), timeout=60).url
    with local, contextlib.closing(streaming.connect(url, streaming.FORWARD)) as remote:
        copy_both_ways(local, remote)


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(code)
