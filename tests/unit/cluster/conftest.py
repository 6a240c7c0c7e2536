"""A controller with its webhook in front of a stateful API server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.cluster_parts import ClusterParts
from fakes.cluster_rights import ShippedRights
from fakes.kubernetes_api import KubernetesApi

from virtshim.cluster.controller import Controller
from virtshim.cluster.moving import MoveLimits
from virtshim.cluster.webhook import Webhook
from virtshim.kubeapi.kubeconfig import access
from virtshim.system.clock import Clock, SystemClock

NAMESPACE = "virtshim-cluster"
CONTROLLER = f"system:serviceaccount:{NAMESPACE}:virtshim-controller"
CLUSTER = Path(__file__).resolve().parents[3] / "deploy/kustomize/overlays/cluster"


@pytest.fixture
def clock() -> Clock:
    """Of the API server and the controllers."""
    return SystemClock()


@pytest.fixture
def rights() -> ShippedRights:
    return ShippedRights()


@pytest.fixture
def api(tmp_path: Path, rights: ShippedRights, clock: Clock) -> Iterator[KubernetesApi]:
    """Controllers have the rights that the manifests give them."""
    made = KubernetesApi(tmp_path, clock=clock)
    made.authorize, made.admit = rights.authorize, rights.admit
    made.tokens |= dict.fromkeys(("controller", "doomed"), CONTROLLER)
    yield made
    made.close()
    assert rights.refused == []


@pytest.fixture
def parts(api: KubernetesApi) -> ClusterParts:
    return ClusterParts(api)


@pytest.fixture
def controller_of(api: KubernetesApi, clock: Clock) -> Iterator[Callable[..., Controller]]:
    running: list[Controller] = []

    def start(token: str = "controller", limits: MoveLimits = MoveLimits()) -> Controller:  # noqa: B008
        config = api.kubeconfig(token)
        made = Controller(lambda: access(config), clock, NAMESPACE, limits)
        running.append(made)
        made.start()
        return made

    yield start
    for one in running:
        one.close()


@pytest.fixture(scope="module")
def closing() -> Iterator[ThreadPoolExecutor]:
    """Closes webhooks beside the next tests: a close takes up to half a second."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def webhook_of(api: KubernetesApi, closing: ThreadPoolExecutor) -> Iterator[Callable[[Controller], Webhook]]:
    running: list[Webhook] = []

    def start(controller: Controller) -> Webhook:
        if not api.all("validatingwebhookconfigurations"):
            for one in yaml.safe_load_all((CLUSTER / "webhook.yaml").read_text()):
                if one["kind"] == "ValidatingWebhookConfiguration":
                    api.put("validatingwebhookconfigurations", one)
        host = f"virtshim-controller.{NAMESPACE}.svc"
        made = Webhook(("127.0.0.1", 0), host, controller.evicted, controller.api, SystemClock())
        running.append(made)
        made.tell_certificate()
        made.start()
        api.services[f"{NAMESPACE}/virtshim-controller"] = made.port
        return made

    yield start
    for one in running:
        closing.submit(one.close)


@pytest.fixture
def vms(api: KubernetesApi) -> Callable[..., dict[str, Any]]:
    """Creates VirtualMachines, as `kubectl apply` does."""

    def create(name: str, template: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        from fakes.kubernetes_api import RESOURCES, Asked

        template = template or {"spec": {"containers": [{"name": "vm", "image": "small"}]}}
        body = {"metadata": {"name": name}, "spec": {"template": template, **spec}}
        (resource,) = [one for one in RESOURCES if one.plural == "virtualmachines"]
        return api.answer(Asked("POST", resource, "shop", name="", sub="", query={}, body=body))

    return create
