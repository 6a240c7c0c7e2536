"""A kubelet for a real node makes the CRI calls for the node's pods in the API server, and writes back their status.

The order is that of kubelet 1.30 to 1.36 (`SyncPod`, `SyncTerminatingPod`, `SyncTerminatedPod`, the status manager). Each pod has
a thread. There are no probes, hooks and cgroups, and no volumes but directories of the host."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import grpc
from fakes.control_planes import NODES, PODS, Document, User
from podclient import PodClient, container_config, pod_config

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cluster.api import below
from virtshim.model.text import parse_bytes

# Seconds: between two looks; until a failed call is repeated, and between a container's second and third start.
_LOOK = 0.2
_BACKOFF = 10.0
# The longest end of a pod under emulation, in seconds.
_LONGEST_END = 120.0


class KubeletOfANode:
    """Runs from its creation until `close`. `failures`: what must not happen in it."""

    def __init__(self, admin: User, name: str, cri: PodClient, logs: str) -> None:
        """`logs`: the directory of the pods' logs."""
        self.admin, self.name, self.cri, self.logs = admin, name, cri, logs
        self.pods: dict[str, PodOfANode] = {}
        self.failures: list[Exception] = []
        self.closing = threading.Event()
        self._join()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        for thread in (self._thread, *(one.thread for one in list(self.pods.values()))):
            thread.join(_LONGEST_END)
            assert not thread.is_alive()

    def _join(self) -> None:
        labels = {"virtshim.io/vms": "true", "kubernetes.io/hostname": self.name}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": labels}, "spec": {}}
        self.admin.do("POST", NODES, node)
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        self.admin.do("LISTS", f"{NODES}/{self.name}/status", {"status": {"conditions": [ready]}})

    def _run(self) -> None:
        try:
            while not self.closing.wait(_LOOK):
                found = self.admin.all(PODS, query=f"?fieldSelector=spec.nodeName%3D{self.name}")
                self._see({one["metadata"]["uid"]: one for one in found})
        except Exception as exc:  # noqa: BLE001 - for the test's own thread
            self.failures.append(exc)

    def _see(self, found: dict[str, Document]) -> None:
        for uid, document in found.items():
            if uid not in self.pods:
                self.pods[uid] = PodOfANode(self, document)
        for uid, pod in list(self.pods.items()):
            pod.latest = found.get(uid)


class PodOfANode:
    """A pod with one container. `latest`: as the API server has it, None if it is gone there. `sandbox`, `container`: the ids, ""
    before there are any."""

    def __init__(self, kubelet: KubeletOfANode, document: Document) -> None:
        self.kubelet, self.cri = kubelet, kubelet.cri
        self.latest: Document | None = document
        self.namespace, self.name, self.uid = (document["metadata"][one] for one in ("namespace", "name", "uid"))
        self.sandbox = self.container = ""
        self._config = _sandbox_config(document, kubelet.logs)
        self._asked: Document = document["spec"]["containers"][0]
        self._attempts = 0
        self._not_before = 0.0
        self._waiting = {"reason": "ContainerCreating"}
        self._written: Document = {}
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    @property
    def path(self) -> str:
        return below(PODS, self.namespace, self.name)

    def _work(self) -> None:
        try:
            while (document := self.latest) is not None and "deletionTimestamp" not in document["metadata"]:
                with contextlib.suppress(grpc.RpcError):  # while the runtime is away
                    self._sync()
                    self._tell(document)
                if self.kubelet.closing.wait(_LOOK):
                    return
            self._end(document or {"metadata": {}})
        except Exception as exc:  # noqa: BLE001 - for the test's own thread
            self.kubelet.failures.append(exc)

    # --- SyncPod

    def _sync(self) -> None:
        if time.monotonic() < self._not_before:
            return
        try:
            if not self.sandbox:
                self.sandbox = self.cri.run_pod(self._config)
            if not self.container or self.cri.status(self.container).state != pb.CONTAINER_RUNNING:
                self._start()
        except grpc.RpcError as exc:
            self._not_before = time.monotonic() + _BACKOFF
            self._waiting = {**self._waiting, "message": str(exc.details())}  # type: ignore[attr-defined]

    def _start(self) -> None:
        attempt, self._attempts = self._attempts, self._attempts + 1
        if attempt:  # the first restart is at once
            self._not_before = time.monotonic() + _BACKOFF
        self._waiting = {"reason": "CreateContainerError"}
        config = _container_config(self._asked, self.cri.pull(self._asked["image"]), attempt)
        for mount in self._asked.get("volumeMounts", ()):
            config.mounts.add(container_path=mount["mountPath"], host_path=self._directory(mount["name"]))
        self.container = self.cri.create(self.sandbox, config, self._config)
        self._waiting = {"reason": "RunContainerError"}
        self.cri.start(self.container)
        self._waiting = {"reason": "CrashLoopBackOff"}

    def _directory(self, volume: str) -> str:
        assert self.latest is not None
        (found,) = [one for one in self.latest["spec"]["volumes"] if one["name"] == volume]
        path: str = found["hostPath"]["path"]
        return path

    # --- the status manager

    def _tell(self, document: Document, phase: str = "") -> None:
        """Only what is new. The conditions of others stay."""
        state, last = self._state(is_over=bool(phase))
        true = {one["type"] for one in document["status"].get("conditions", ()) if one["status"] == "True"}
        passes = all(one["conditionType"] in true for one in document["spec"].get("readinessGates", ()))
        runs = "running" in state
        container = {
            "name": self._asked["name"], "image": self._asked["image"], "imageID": "", "ready": runs,
            "restartCount": max(0, self._attempts - 1), "state": state, "lastState": last,
        }  # fmt: skip
        found = {
            "phase": phase or ("Running" if runs or last else "Pending"),
            "containerStatuses": [container],
            "conditions": [
                {"type": "ContainersReady", "status": str(runs)},
                {"type": "Ready", "status": str(runs and passes)},
            ],
        }
        if found != self._written:
            self._written = found
            self.kubelet.admin.ask("LISTS", f"{self.path}/status", {"metadata": {"uid": self.uid}, "status": found})

    def _state(self, *, is_over: bool) -> tuple[Document, Document]:
        """Of the container now, and of its last end."""
        if not self.container:
            return {"waiting": self._waiting}, {}
        found = self.cri.status(self.container)
        if found.state == pb.CONTAINER_RUNNING:
            return {"running": {"startedAt": _stamp(found.started_at)}}, {}
        if found.state != pb.CONTAINER_EXITED:
            return {"waiting": self._waiting}, {}
        ended = {"exitCode": found.exit_code, "reason": found.reason, "message": found.message}
        return ({"terminated": ended}, {}) if is_over else ({"waiting": self._waiting}, {"terminated": ended})

    # --- SyncTerminatingPod, SyncTerminatedPod

    def _end(self, document: Document) -> None:
        while not self._ended(document):
            if self.kubelet.closing.wait(_BACKOFF):
                return
        self.kubelet.pods.pop(self.uid, None)

    def _ended(self, document: Document) -> bool:
        """The pod is over in the API server before it is gone there. The sandbox is removed at last, as by garbage collection."""
        try:
            if self.container and self.cri.status(self.container).state == pb.CONTAINER_RUNNING:
                self.cri.stop(self.container, document["metadata"].get("deletionGracePeriodSeconds", 0))
            if self.sandbox:
                self.cri.stop_pod(self.sandbox)
            if "status" in document:
                self._tell(document, self._last_phase())
                options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
                self.kubelet.admin.ask("DELETE", self.path, options)
            if self.sandbox:
                self.cri.remove_pod(self.sandbox)
        except grpc.RpcError:
            return False
        return True

    def _last_phase(self) -> str:
        is_good = bool(self.container) and self.cri.status(self.container).exit_code == 0
        return "Succeeded" if is_good else "Failed"


def _sandbox_config(document: Document, logs: str) -> pb.PodSandboxConfig:
    metadata = document["metadata"]
    namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
    annotations = {**metadata.get("annotations", {}), "kubernetes.io/config.source": "api"}
    config = pod_config(name, f"{logs}/{namespace}_{name}_{uid}", annotations, namespace)
    config.metadata.uid = config.labels["io.kubernetes.pod.uid"] = uid
    config.hostname = document["spec"].get("hostname", name)
    config.labels.update(metadata.get("labels", {}))
    return config


def _container_config(asked: Document, image: str, attempt: int) -> pb.ContainerConfig:
    limits: dict[str, Any] = asked.get("resources", {}).get("limits", {})
    config = container_config(image, parse_bytes(limits.get("memory", "0")), asked["name"], attempt)
    config.image.user_specified_image = asked["image"]
    config.command.extend(asked.get("command", ()))
    return config


def _stamp(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(nanoseconds / 1e9))
