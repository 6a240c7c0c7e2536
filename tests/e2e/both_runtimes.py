"""A node has containerd and virtshim behind its proxy, and a kubelet that uses the proxy."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from bench.containerd import bring_image
from fakes.kubelet_calls import Kubelet, KubeletPod
from guest import answers
from node import Node, free_cidr
from podclient import PodClient, wait_until

from criproto.runtime_v1 import api_pb2 as pb

LIMIT = 60.0


@dataclass(frozen=True)
class Both:
    """A node, its sockets, and a kubelet that uses the proxy."""

    node: Node
    proxy: PodClient
    containerd: PodClient
    virtshim: PodClient
    kubelet: Kubelet

    def pod(self, name: str, handler: str = "", source: str = "api", **annotations: str) -> KubeletPod:
        return KubeletPod(self.kubelet, name, handler, annotations, source, f"{self.node.directory}/logs/{name}")


@contextlib.contextmanager
def node_with_containerd(config: str = "") -> Iterator[Both]:
    """The node is empty at first and is removed with its containers and VMs; containerd has IMAGE. `config`: more settings."""
    with tempfile.TemporaryDirectory(prefix="virtshim-both-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o711)
        # A runtime that does not answer for four seconds is down; tests wait for that.
        node = Node(f"{directory}/n", pod_cidr=free_cidr(), config=f"[proxy]\nanswer_timeout = 4\n{config}")
        run = f"{node.directory}/run"
        try:
            node.up("--with-containerd")
            with (
                PodClient(f"{run}/proxy.sock") as proxy,
                PodClient(f"{run}/containerd.sock") as containerd,
                PodClient(node.socket) as virtshim,
            ):
                wait_until(lambda: answers(containerd), LIMIT, "containerd serves its CRI")
                told = containerd.runtime.Status(pb.StatusRequest(verbose=True), timeout=LIMIT).info["config"]
                sandbox = json.loads(told)["sandboxImage"]
                bring_image(f"{run}/containerd.sock", node.directory, containerd, sandbox)
                yield Both(node, proxy, containerd, virtshim, Kubelet(proxy.runtime, proxy.images))
        finally:
            node.down()
        assert not os.path.exists(node.directory)
