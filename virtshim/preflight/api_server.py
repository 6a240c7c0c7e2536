"""Checks against the API server: the rights of `kubernetes.kubeconfig`, and, for `virtshim check --kubeconfig`, the cluster's
RuntimeClasses. Also the agent's credentials, without asking the server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from virtshim.annotations.from_cluster import sources
from virtshim.annotations.parse import parse_vm_options
from virtshim.kubeapi.asking import get
from virtshim.kubeapi.events import EVENTS_GUIDE
from virtshim.kubeapi.kubeconfig import Access, access, token_claims
from virtshim.kubeapi.objects import GUIDE, PLURAL, mapping, may
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.model.sandbox import Sandbox
from virtshim.preflight.finding import Finding, ok, warning
from virtshim.preflight.overhead import RUNTIME_CLASS, RuntimeClass, runtime_class
from virtshim.preflight.virtualization import ProgramOutput
from virtshim.seed.sources import DataSource

# Does the API server of `kubernetes.kubeconfig` answer? May this node read what its pods name, and create Events of pods?

_SUBJECT: Final = "API server"
_EVENTS: Final = "Events"
# How many named objects are tried. Each one is a request.
_MOST: Final = 8


@dataclass(frozen=True, slots=True)
class Named:
    """A Secret or ConfigMap that a pod names in an annotation."""

    namespace: str
    source: DataSource

    def __str__(self) -> str:
        return f"{self.source.kind} {self.namespace}/{self.source.name}"


def named_objects(sandboxes: Iterable[Sandbox]) -> list[Named]:
    """The named objects in their order, each once."""
    found: dict[str, Named] = {}
    for sandbox in sandboxes:
        with contextlib.suppress(ShimError):  # the pod's containers are refused with this error
            for source in sources(parse_vm_options(sandbox.vm_annotations)):
                one = Named(sandbox.key.namespace, source)
                found.setdefault(str(one), one)
    return list(found.values())


def api_server_findings(kubeconfig: str, wanted: Sequence[Named], unread: str = "", remedy: str = "") -> list[Finding]:
    """Findings for a kubeconfig that is set. `unread`: which records could not be read, so that their pods may name more
    objects. `remedy`: what to do about that."""
    try:
        at = access(kubeconfig, verified=True)
    except (OSError, ValueError, InvalidRequest) as exc:
        return [_trouble(f"kubernetes.kubeconfig {kubeconfig}: {_line(exc)}", "correct the file or the setting")]
    where = f"{at.host}:{at.port}"
    try:
        finding = (
            _may_get(at, where, wanted)
            if wanted
            else _at_large(at, where, "" if unread else "no pod of this node names any")
        )
        events = _events(at, where)
    except ShimError as exc:
        text, _, own_remedy = str(exc).partition("; ")
        return [_trouble(f"{where}: {text}", own_remedy)]
    except (OSError, ValueError) as exc:
        own_remedy = (
            f"make sure that the API server runs, that this node reaches it, and that {kubeconfig} is of this cluster"
        )
        return [_trouble(f"{where}: {_line(exc)}", own_remedy)]
    if not unread:
        return [finding, events]
    text = f"{finding.text}; pods of this node may name more objects, but {unread}"
    return [warning(_SUBJECT, text, "; ".join(filter(None, (finding.remedy, remedy)))), events]


def _events(at: Access, where: str) -> Finding:
    """Whether Events can tell the owners of pods about problems of their VMs."""
    if may(at, "create", "events"):
        return ok(_EVENTS, f"{where}: this node may create Events of pods")
    return warning(
        _EVENTS,
        f"{where}: this node may not create Events, so problems of VMs appear only in the logs of their containers",
        f"grant this node the right to create events: {EVENTS_GUIDE}",
    )


def _may_get(at: Access, where: str, wanted: Sequence[Named]) -> Finding:
    tried, left_out = wanted[:_MOST], len(wanted[_MOST:])
    missing = [str(one) for one in tried if not may(at, "get", PLURAL[one.source.kind], one.namespace, one.source.name)]
    rest = f"; {left_out} more were not tried" if left_out else ""
    if missing:
        remedy = (
            "also name it in the spec of its pod, as a volume, or grant this node the right to get it with a Role: "
            f"{GUIDE}"
        )
        return warning(
            _SUBJECT, f"{where}: this node may not get objects that its pods name: {', '.join(missing)}{rest}", remedy
        )
    return ok(_SUBJECT, f"{where}: this node may get the objects that its pods name ({len(tried)}){rest}")


def _at_large(at: Access, where: str, rest: str) -> Finding:
    """What this node may read in general. Whether a future pod gets its objects also depends on its namespace and
    spec. `rest`: text to add."""
    every = [resource for resource in PLURAL.values() if may(at, "get", resource)]
    rights = (
        f"all {' and '.join(every)} of the cluster"
        if every
        else "the objects that pods' specs and Roles of their namespaces allow"
    )
    return ok(_SUBJECT, "; ".join(filter(None, (f"{where} answers, and this node may read {rights}", rest))))


def _trouble(text: str, remedy: str) -> Finding:
    return warning(
        _SUBJECT, f"{text}; pods that name Secrets or ConfigMaps are refused, and pods get no Events", remedy
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


_PATH: Final = "/apis/node.k8s.io/v1/runtimeclasses"


def runtime_classes_in(
    kubeconfig: str, handlers: Sequence[str], pod_handlers: Collection[str] = ()
) -> list[RuntimeClass]:
    """The cluster's RuntimeClasses with one of the handlers. If there is none, or the cluster cannot be asked, a single one
    whose `trouble` says so. `pod_handlers`: a cluster needs none of these."""
    try:
        found = _runtime_class_items(kubeconfig)
    except (OSError, ValueError, InvalidRequest) as exc:
        return [RuntimeClass(kubeconfig, trouble=f"the cluster's RuntimeClasses cannot be read: {_line(exc)}")]
    classes = []
    for item in found:
        named = mapping(item, "metadata").get("name", "")
        # Items of a list have no kind of their own.
        one = runtime_class(f"RuntimeClass {named}", {**item, "kind": "RuntimeClass"})
        if one.trouble or one.handler in (*handlers, *pod_handlers):
            classes.append(one)
    none = f"the cluster has no RuntimeClass with the handler {' or '.join(handlers)}; kubectl apply -f {RUNTIME_CLASS}"
    return classes or [RuntimeClass(kubeconfig, trouble=none)]


def _runtime_class_items(kubeconfig: str) -> list[Any]:
    at = access(kubeconfig)
    answer = get(at, _PATH)
    if answer.status != 200:
        raise InvalidRequest(f"{at.host} answers {answer.status} {answer.reason}")
    items = answer.document.get("items")
    return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []


# Does `virtshim agent` run as a service of this node, and does its token hold?

_AGENT: Final = "agent"
_RENEW: Final = "write a new token where the kubeconfig says (docs/cluster.md, A node that runs VMs alone)"
# The part of a token's life after which it should have been renewed.
_DUE: Final = 2 / 3


def agent_findings(kubeconfig: str, state: ProgramOutput, now: float) -> list[Finding]:
    """Findings for a kubeconfig that is there. `state`: systemd's ActiveState of the service. `now`: seconds since the epoch."""
    found = [_agent_token(kubeconfig, now)]
    if state.trouble:
        remedy = "run this command as root, on a node with systemd"
        return [*found, warning(_AGENT, f"whether it runs is not known: {state.trouble}", remedy)]
    if state.text != "active":
        text = f"{kubeconfig} is there, but virtshim-agent.service is {state.text or 'unknown'}: the cluster hears nothing of VMs"
        remedy = "systemctl enable --now virtshim-agent; journalctl -u virtshim-agent; or remove the kubeconfig"
        return [*found, warning(_AGENT, text, remedy)]
    return found


def _agent_token(kubeconfig: str, now: float) -> Finding:
    try:
        token = access(kubeconfig, verified=True).token
    except (OSError, ValueError, InvalidRequest) as exc:
        return warning(_AGENT, f"{kubeconfig}: {_line(exc)}", "correct the file, or run this command as root")
    claims = token_claims(token)
    if not claims.node:
        text = f"{kubeconfig}: its user has no token that is bound to a node, so the API server refuses what the agent writes"
        remedy = "make a token for the agent itself, never use kubelet's kubeconfig (docs/cluster.md, A node that runs VMs alone)"
        return warning(_AGENT, text, remedy)
    if claims.expires is None:
        return ok(_AGENT, f"{kubeconfig}: its token is bound to node {claims.node}, and does not expire")
    told = f"{kubeconfig}: its token, bound to node {claims.node},"
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(claims.expires))
    if claims.expires <= now:
        return warning(_AGENT, f"{told} expired at {until}", _RENEW)
    if claims.issued is not None and now > claims.issued + (claims.expires - claims.issued) * _DUE:
        return warning(
            _AGENT, f"{told} expires at {until}, and nobody has renewed it in two thirds of its life", _RENEW
        )
    return ok(_AGENT, f"{told} expires at {until}")
