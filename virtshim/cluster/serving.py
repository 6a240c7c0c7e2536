"""Runs `virtshim controller` and `virtshim agent`. Each imports only what it needs, because gRPC and the library for certificates
take a third of such a program's memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tapmanager.heap import return_freed_memory
from virtshim.cluster.moving import MoveLimits
from virtshim.kubeapi.kubeconfig import Access, access, access_in_cluster, token_claims
from virtshim.model.errors import InvalidRequest, Unavailable
from virtshim.model.text import ListenAddress, is_object_name
from virtshim.system.clock import SystemClock
from virtshim.system.daemon import notify_systemd
from virtshim.system.threads import lasting

if TYPE_CHECKING:
    from virtshim.cluster.controller import Controller
    from virtshim.cluster.webhook import Webhook

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """`kubeconfig`: "" for the service account of the pod. `namespace`: of the controller's service and of the agents' leases.
    `listen`: where the webhook listens, "" for no webhook. `signs`: whether it signs the certificates of nodes."""

    kubeconfig: str
    namespace: str
    listen: str
    limits: MoveLimits
    signs: bool = False


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """`node`: the name of the node in the cluster, "" for the node that the kubeconfig's token is bound to. `admin`: virtshim's
    admin socket. `translations_dir`: where image mappings are mirrored, "" for nowhere. `certificates`: the directory for this
    node's certificate, "" if others take care of it."""

    kubeconfig: str
    namespace: str
    node: str
    admin: str
    translations_dir: str
    certificates: str = ""


def serve_agent(options: AgentOptions, stopping: threading.Event) -> None:
    """Runs until `stopping` is set. Raises ShimError if it cannot start."""
    from virtshim.cluster.agent import Agent
    from virtshim.cri.operator_client import operating

    own = access_of(options.kubeconfig)
    node = options.node
    if not node and options.kubeconfig:
        node = token_claims(_readable(own).token).node
    if not is_object_name(node):
        raise InvalidRequest(
            "--node: write the node's name as `kubectl get nodes` shows it, or set NODE_NAME, or use a token bound to the node"
        )
    agent = Agent(
        node,
        options.namespace,
        own,
        SystemClock(),
        lambda: operating(options.admin),
        options.translations_dir,
        alive=lambda: notify_systemd("WATCHDOG=1"),
    )
    if options.certificates and not os.path.isabs(options.certificates):
        raise InvalidRequest("--certificates: must be an absolute path, such as /var/lib/virtshim/peers")
    with contextlib.closing(agent):
        if options.certificates:
            from virtshim.cluster.node_certificate import NodeCertificate

            certificate = NodeCertificate(node, options.namespace, options.certificates, agent.api, SystemClock())
            lasting(lambda: certificate.run(stopping), "certificate")
        agent.start()
        return_freed_memory()
        notify_systemd("READY=1", f"STATUS=Tells the API server about the virtual machines of node {node}")
        log.info("agent.serving", node=node)
        agent.run(stopping)
        notify_systemd("STOPPING=1")


def _readable(own: Callable[[], Access]) -> Access:
    """Raises InvalidRequest."""
    try:
        return own()
    except (OSError, ValueError) as exc:
        raise InvalidRequest(f"the credentials for the API server cannot be read: {exc}") from exc


def access_of(kubeconfig: str) -> Callable[[], Access]:
    """Reads the credentials anew for each request, as others renew them."""
    if kubeconfig:
        return lambda: access(kubeconfig, verified=True)
    return lambda: access_in_cluster(os.environ)


def serve_controller(options: ControllerOptions, stopping: threading.Event) -> None:
    """Runs until `stopping` is set. Raises ShimError if it cannot start."""
    from virtshim.cluster.controller import Controller

    if options.limits.in_all < 1 or options.limits.from_node < 1:
        raise InvalidRequest("--moves and --moves-from-node: must be at least 1")
    clock = SystemClock()
    own = access_of(options.kubeconfig)
    _readable(own)
    with contextlib.ExitStack() as closing:
        controller = Controller(own, clock, options.namespace, options.limits)
        closing.callback(controller.close)
        controller.start()
        if options.signs:
            from virtshim.cluster.signer import Signer

            signer = Signer(own, clock, options.namespace)
            closing.callback(signer.close)
            signer.start()
        if options.listen:
            webhook = _webhook(options, controller)
            closing.callback(webhook.close)
            webhook.start()
        return_freed_memory()
        log.info("controller.serving")
        stopping.wait()
        log.info("controller.stopping")


def _webhook(options: ControllerOptions, controller: Controller) -> Webhook:
    from virtshim.cluster.webhook import Webhook

    address = ListenAddress.parse(options.listen)
    if address.path:
        raise InvalidRequest("--listen: the API server needs an address and a port, such as 0.0.0.0:9443")
    host = f"virtshim-controller.{options.namespace}.svc"
    try:
        return Webhook((address.host, address.port), host, controller.evicted, controller.api, SystemClock())
    except OSError as exc:
        raise Unavailable(f"--listen {options.listen}: {exc.strerror or exc}") from exc
