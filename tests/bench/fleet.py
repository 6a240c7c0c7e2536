"""Measures `virtshim controller` and `virtshim agent` with 500 idle VirtualMachine objects on ten nodes, and how fast
an eviction is answered. Both are programs. The API server is the tests' stand-in, and its own time for one write is a
part of an answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from figures import Figures, timed

from virtshim.cluster.reading import vm_seen
from virtshim.cluster.values import FINALIZER, MOVABLE, budget_name
from virtshim.cluster.writing import budget, owner

PROJECT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from fakes.cluster_parts import ClusterParts  # noqa: E402  needs the path above
from fakes.kubernetes_api import Document, KubernetesApi  # noqa: E402

VMS: Final = 500
_NODES: Final = tuple(f"n{number}" for number in range(10))
_IDLE: Final = 60.0
_ANSWERS: Final = 300
_TEMPLATE: Final = {"spec": {"containers": [{"name": "vm", "image": "small"}]}}


def fleet_round(socket: str, figures: Figures) -> None:
    """`socket`: of a node, which runs no VM of these objects."""
    with tempfile.TemporaryDirectory(prefix="virtshim-fleet-") as place:
        api = KubernetesApi(Path(place))
        ClusterParts(api, _NODES)
        for number in range(VMS):
            _put(api, f"vm{number}", _NODES[number % len(_NODES)])
        kubeconfig = ("--kubeconfig", api.kubeconfig())
        with contextlib.ExitStack() as stack:
            stack.callback(api.close)
            controller, said = stack.enter_context(_program("controller", *kubeconfig, "--listen", "127.0.0.1:0"))
            for node in _NODES:
                agent, _ = stack.enter_context(_program("agent", *kubeconfig, "--node", node, "--socket", socket))
            _settle(api)
            before = len(api.asked)
            time.sleep(_IDLE)
            figures.add("requests_per_minute_500_vms", (len(api.asked) - before) * 60 / _IDLE, "requests")
            figures.add("controller_mib", _resident(controller), "MiB")
            figures.add("agent_mib", _resident(agent), "MiB")
            _ask(int(said["port"]), figures)


def _ask(port: int, figures: Figures) -> None:
    """Over one connection, as the API server does. Each answer is the first about its VM, so that it writes a mark."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, context=tls, timeout=30)) as connection:
        connection.connect()
        for number in range(_ANSWERS):
            figures.add("evict_answer_ms", timed(lambda number=number: _evicted(connection, f"vm{number}")), "ms")  # type: ignore[misc]


def _evicted(connection: http.client.HTTPSConnection, vm: str) -> None:
    request = {"uid": vm, "subResource": "eviction", "namespace": "shop", "name": f"{vm}-1", "object": {}}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    connection.request("POST", "/evictions", json.dumps(review), {"Content-Type": "application/json"})
    response = json.loads(connection.getresponse().read())["response"]
    assert "it cannot move" in response["status"]["message"], response


def _put(api: KubernetesApi, name: str, node: str) -> None:
    """A VM as it is when it runs. Devices of the host keep it where it is, so that an eviction changes nothing else."""
    spec = {"state": "Running", "drain": "Move", "stayOnNode": False, "template": _TEMPLATE}
    pod = {"name": f"{name}-1", "uid": f"pod-{name}"}
    status = {"record": {"pod": pod, "node": node}}
    metadata: Document = {"namespace": "shop", "name": name, "uid": name, "generation": 1, "finalizers": [FINALIZER]}
    vm = api.put("virtualmachines", {"metadata": metadata, "spec": spec, "status": status})
    seen = vm_seen(vm, has_budget=True)
    movable = {"type": MOVABLE, "status": "False", "reason": "HostDevices", "message": "it has devices of the host"}
    api.put(
        "pods",
        {
            "metadata": {
                **pod,
                "namespace": "shop",
                "labels": {"virtshim.io/vm": name},
                "annotations": {"virtshim.io/vm": name},
                "ownerReferences": [owner(seen)],
            },
            "spec": {**_TEMPLATE["spec"], "nodeName": node},
            "status": {
                "phase": "Running",
                "containerStatuses": [{"name": "vm", "state": {"running": {}}}],
                "conditions": [movable, {"type": "Ready", "status": "True"}],
            },
        },
    )
    api.put(
        "poddisruptionbudgets", {**budget(seen), "metadata": {**budget(seen)["metadata"], "name": budget_name(name)}}
    )


def _settle(api: KubernetesApi) -> None:
    """Waits until each object says that its VM runs."""
    end = time.monotonic() + 300
    while any(one["status"].get("phase") != "Running" for one in api.all("virtualmachines")):
        assert time.monotonic() < end, "the controller has not settled the objects"
        time.sleep(1)


@contextlib.contextmanager
def _program(*words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """One of the cluster's programs, when it serves, and the last that it said with a port."""
    argv = [sys.executable, "-m", "virtshim", *words]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=os.environ | {"NO_COLOR": "1"}) as program:
        assert program.stderr is not None
        said: dict[str, Any] = {}
        try:
            while True:
                line = json.loads(program.stderr.readline())
                said = line if "port" in line else said
                if line["event"] == f"{words[0]}.serving":
                    break
            with open(os.devnull, "w") as nowhere:  # a full pipe would stop it
                drain = subprocess.Popen(["cat"], stdin=program.stderr, stdout=nowhere)
            yield program, said
            program.send_signal(signal.SIGTERM)
            assert program.wait(30) == 0
            drain.wait(30)
        finally:
            program.kill()


def _resident(program: subprocess.Popen[str]) -> float:
    lines = Path(f"/proc/{program.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


if __name__ == "__main__":
    own = Figures()
    fleet_round(sys.argv[1] if len(sys.argv) > 1 else "/run/virtshim/virtshim.sock", own)
    own.tell()
