"""Control planes for the contract of the cluster's programs: the stand-in, and a real one.

Both are asked by HTTPS, so that a test cannot tell them apart. VIRTSHIM_TEST_CONTROL_PLANE names the kubeconfig of an empty
cluster with kube-controller-manager and kube-scheduler, whose user may do everything. VIRTSHIM_TEST_HOST is the name by which its
API server finds this machine, "localhost" if it is not set.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import yaml
from fakes.cluster_parts import Scheduler
from fakes.cluster_rights import ShippedRights
from fakes.kubernetes_api import KubernetesApi

from virtshim.cluster.api import below
from virtshim.kubeapi import asking
from virtshim.kubeapi.asking import Answer
from virtshim.kubeapi.kubeconfig import Access, access

Document = dict[str, Any]

KUBECONFIG = os.environ.get("VIRTSHIM_TEST_CONTROL_PLANE", "")
HOST = os.environ.get("VIRTSHIM_TEST_HOST", "localhost")
NAMESPACE = "virtshim-cluster"
NAMESPACES = "/api/v1/namespaces"
NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
EVICTIONS = "virtshim-evictions"
DEPLOY = Path(__file__).resolve().parents[2] / "deploy/kustomize"


def until(condition: Callable[[], Any], act: Callable[[], None] = lambda: None, seconds: float = 90.0) -> Any:
    """Acts until the condition holds, and returns what it returned."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it has not come about"
        act()
        time.sleep(0.05)
    return found


class User:
    """Somebody whom the API server knows."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        found = access(kubeconfig)
        self.access: Callable[[], Access] = lambda: found

    def ask(self, method: str, path: str, body: Document | None = None) -> Answer:
        """`method`: PATCH is a merge patch; LISTS a strategic one."""
        body = body or {}
        match method:
            case "GET":
                return asking.get(self.access(), path, asking.RequestLimits(30.0))
            case "PATCH":
                return asking.ask(self.access(), method, path, body, asking.MERGE_PATCH)
            case "LISTS":
                return asking.ask(self.access(), "PATCH", path, body, asking.STRATEGIC_PATCH)
            case _:
                return asking.ask(self.access(), method, path, body)

    def do(self, method: str, path: str, body: Document | None = None) -> Document:
        answer = self.ask(method, path, body)
        assert answer.status in (200, 201, 202), f"{method} {path}: {answer.status} {answer.document}"
        return answer.document

    def all(self, path: str, namespace: str = "", query: str = "") -> list[Document]:
        found: list[Document] = self.do("GET", (below(path, namespace) if namespace else path) + query)["items"]
        return found


class Plane(Protocol):
    """`webhook_name`: the name that the webhook's certificate must have. `listen`: where the webhook listens."""

    admin: User
    webhook_name: str
    listen: str

    def user(self, account: str, node: str = "") -> User:
        """A service account of the manifests, with a token that is bound to the node."""

    def namespace(self) -> str:
        """A new one."""

    def reach(self, port: int) -> None:
        """The API server asks the webhook there from now on."""

    def act(self) -> None:
        """Lets its own parts go on that have no threads."""

    def close(self) -> None: ...


def config_for(kubeconfig: str, path: Path, token: str) -> str:
    """As the kubeconfig, with another user."""
    document = yaml.safe_load(Path(kubeconfig).read_text())
    (context,) = [one["context"] for one in document["contexts"] if one["name"] == document["current-context"]]
    context["user"] = "other"
    document["users"] = [{"name": "other", "user": {"token": token}}]
    path.write_text(yaml.safe_dump(document))
    return str(path)


class StandIn:
    """tests/fakes/kubernetes_api.py, with the rights that the manifests give."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._rights = ShippedRights()
        self.api = KubernetesApi(place)
        self.api.authorize, self.api.admit = self._rights.authorize, self._rights.admit
        self._scheduler = Scheduler(self.api)
        self.admin = User(self.api.kubeconfig())
        self.webhook_name = f"virtshim-controller.{NAMESPACE}.svc"
        self.listen = "127.0.0.1"
        for one in yaml.safe_load_all((DEPLOY / "overlays/cluster/webhook.yaml").read_text()):
            if one["kind"] == "ValidatingWebhookConfiguration":
                self.admin.do("POST", WEBHOOKS, one)

    def user(self, account: str, node: str = "") -> User:
        token = secrets.token_hex(8)
        self.api.tokens[token] = f"system:serviceaccount:{NAMESPACE}:{account}"
        if node:
            self._rights.extra[token] = {"authentication.kubernetes.io/node-name": [node]}
        return User(self.api.kubeconfig(token))

    def namespace(self) -> str:
        name = f"shop-{secrets.token_hex(3)}"
        self.admin.do("POST", NAMESPACES, {"metadata": {"name": name}})
        return name

    def reach(self, port: int) -> None:
        self.api.services[f"{NAMESPACE}/virtshim-controller"] = port

    def act(self) -> None:
        self._scheduler.act()

    def close(self) -> None:
        self.api.close()


class RealPlane:
    """A control plane that somebody runs. What is made there goes at the end."""

    def __init__(self, kubeconfig: str, place: Path) -> None:
        self._place = place
        self.admin = User(kubeconfig)
        self.webhook_name = HOST
        self.listen = "127.0.0.1" if HOST == "localhost" else "0.0.0.0"
        taken = [one["metadata"]["name"] for one in self.admin.all(NAMESPACES)]
        assert NAMESPACE not in taken, f"{kubeconfig}: the cluster is used: it has a namespace {NAMESPACE}"
        self._manifests = self._shipped()
        self.kubectl("apply", "-f", str(self._manifests))
        controller = self.user("virtshim-controller")
        stranger = {"metadata": {"generateName": "x-"}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
        asked = f"{below(PODS, 'default')}?dryRun=All"
        until(lambda: "belongs to a VirtualMachine" in str(controller.ask("POST", asked, stranger).document))

    def kubectl(self, *words: str, input: str = "") -> str:  # noqa: A002 - as subprocess names it
        argv = ["kubectl", "--kubeconfig", self.admin.kubeconfig, "--cache-dir", str(self._place / "cache"), *words]
        done = subprocess.run(argv, input=input, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, f"kubectl {words[0]}: {done.stderr}"
        return done.stdout

    def _shipped(self) -> Path:
        """What the overlays say. The programs run here, so that a dry run has to do for the Deployment and the DaemonSet."""
        text = "---\n".join(self.kubectl("kustomize", str(DEPLOY / one)) for one in ("base", "overlays/cluster"))
        found = {True: [], False: []}  # type: dict[bool, list[Document]]
        for one in yaml.safe_load_all(text):
            found[one["kind"] in ("Deployment", "DaemonSet")].append(one)
        self.workloads = yaml.safe_dump_all(found[True])
        path = self._place / "shipped.yaml"
        path.write_text(yaml.safe_dump_all(found[False]))
        return path

    def user(self, account: str, node: str = "") -> User:
        spec: Document = {"expirationSeconds": 7200}
        if node:
            uid = self.admin.do("GET", f"{NODES}/{node}")["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        path = below("/api/v1/serviceaccounts", NAMESPACE, account, "token")
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        token = self.admin.do("POST", path, asked)["status"]["token"]
        return User(config_for(self.admin.kubeconfig, self._place / f"{account}-{node}-{secrets.token_hex(3)}", token))

    def namespace(self) -> str:
        name = f"shop-{secrets.token_hex(3)}"
        self.admin.do("POST", NAMESPACES, {"metadata": {"name": name}})
        account = below("/api/v1/serviceaccounts", name, "default")
        until(lambda: self.admin.ask("GET", account).status == 200)  # pods cannot be made before
        return name

    def reach(self, port: int) -> None:
        (webhook,) = self.admin.do("GET", f"{WEBHOOKS}/{EVICTIONS}")["webhooks"]
        webhook["clientConfig"]["url"] = f"https://{HOST}:{port}/evictions"
        webhook["clientConfig"].pop("service", None)
        self.admin.do("PATCH", f"{WEBHOOKS}/{EVICTIONS}", {"webhooks": [webhook]})

    def act(self) -> None:
        """Its parts are programs of their own."""

    def close(self) -> None:
        self.kubectl("delete", "--timeout=120s", "-f", str(self._manifests))
