"""The cluster's RuntimeClasses, asked with a kubeconfig: for `virtshim check --kubeconfig`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from virtshim.annotations.from_cluster import sources
from virtshim.annotations.parse import parse_vm_options
from virtshim.kubeapi.asking import get
from virtshim.kubeapi.events import EVENTS_GUIDE
from virtshim.kubeapi.kubeconfig import Access, access
from virtshim.kubeapi.objects import GUIDE, PLURAL, may
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.model.sandbox import Sandbox
from virtshim.preflight.finding import Finding, ok, warning
from virtshim.preflight.overhead import RUNTIME_CLASS, RuntimeClass, runtime_class
from virtshim.seed.sources import DataSource

# Whether the API server of `kubernetes.kubeconfig` answers, gives what pods of this node name, and takes Events of
# them.

_SUBJECT: Final = "API server"
_EVENTS: Final = "Events"
# Of what pods name; each is a request.
_MOST: Final = 8


@dataclass(frozen=True, slots=True)
class Named:
    """What a pod names by an annotation."""

    namespace: str
    source: DataSource

    def __str__(self) -> str:
        return f"{self.source.kind} {self.namespace}/{self.source.name}"


def api_server_named(sandboxes: Iterable[Sandbox]) -> list[Named]:
    """Each once, in their order."""
    found: dict[str, Named] = {}
    for sandbox in sandboxes:
        with contextlib.suppress(ShimError):  # its containers are refused with that
            for source in sources(parse_vm_options(sandbox.vm_annotations)):
                one = Named(sandbox.key.namespace, source)
                found.setdefault(str(one), one)
    return list(found.values())


def api_server_findings(kubeconfig: str, wanted: Sequence[Named], unread: str = "", remedy: str = "") -> list[Finding]:
    """Of a file that is set. `unread`: which records could not be read, whose pods may name more; and what to do about that."""
    try:
        at = access(kubeconfig, verified=True)
    except (OSError, ValueError, InvalidRequest) as exc:
        return [_trouble(f"kubernetes.kubeconfig {kubeconfig}: {_line(exc)}", "correct that file, or the setting")]
    where = f"{at.host}:{at.port}"
    try:
        told = (
            _api_server_asked(at, where, wanted)
            if wanted
            else _at_large(at, where, "" if unread else "no pod here names any")
        )
        events = _events(at, where)
    except ShimError as exc:
        text, _, own_remedy = str(exc).partition("; ")
        return [_trouble(f"{where}: {text}", own_remedy)]
    except (OSError, ValueError) as exc:
        own_remedy = f"see that it runs, that this node reaches it, and that {kubeconfig} is of this cluster"
        return [_trouble(f"{where}: {_line(exc)}", own_remedy)]
    if not unread:
        return [told, events]
    text = f"{told.text}; what else pods here name is not known: {unread}"
    return [warning(_SUBJECT, text, "; ".join(filter(None, (told.remedy, remedy)))), events]


def _events(at: Access, where: str) -> Finding:
    """Whether pods' owners learn by Events what is wrong with their VMs."""
    if may(at, "create", "events"):
        return ok(_EVENTS, f"{where}: this node may create Events of pods")
    return warning(
        _EVENTS,
        f"{where}: this node may not create Events, so what is wrong with VMs is told in the logs of their containers only",
        f"have the right to create events granted: {EVENTS_GUIDE}",
    )


def _api_server_asked(at: Access, where: str, wanted: Sequence[Named]) -> Finding:
    tried, left_out = wanted[:_MOST], len(wanted[_MOST:])
    missing = [str(one) for one in tried if not may(at, "get", PLURAL[one.source.kind], one.namespace, one.source.name)]
    rest = f"; {left_out} more were not tried" if left_out else ""
    if missing:
        remedy = (
            "name it in the spec of its pod as well, by a volume, or have this node's right to get it granted by a Role: "
            f"{GUIDE}"
        )
        return warning(
            _SUBJECT, f"{where}: this node may not get what pods here name: {', '.join(missing)}{rest}", remedy
        )
    return ok(_SUBJECT, f"{where}: this node may get what pods here name ({len(tried)}){rest}")


def _at_large(at: Access, where: str, rest: str) -> Finding:
    """Whether a pod that comes gets its own depends on its namespace and its spec. `rest`: what is said besides."""
    every = [resource for resource in PLURAL.values() if may(at, "get", resource)]
    rights = (
        f"all {' and '.join(every)} of the cluster" if every else "what pods' specs and Roles of their namespaces allow"
    )
    return ok(_SUBJECT, "; ".join(filter(None, (f"{where} answers, and gives this node {rights}", rest))))


def _trouble(text: str, remedy: str) -> Finding:
    return warning(
        _SUBJECT, f"{text}; pods that name Secrets or ConfigMaps are refused, and no pod gets Events", remedy
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


_PATH: Final = "/apis/node.k8s.io/v1/runtimeclasses"


def cluster_runtime_classes(kubeconfig: str, handlers: Sequence[str]) -> list[RuntimeClass]:
    """Those with one of the handlers; one with `trouble` if the cluster has none, or cannot be asked."""
    try:
        found = _cluster_asked(kubeconfig)
    except (OSError, ValueError, InvalidRequest) as exc:
        return [RuntimeClass(kubeconfig, trouble=f"the cluster's cannot be read: {' '.join(str(exc).split())[:300]}")]
    told = []
    for item in found:
        named = _mapping(item, "metadata").get("name", "")
        # In a list, the items do not say what they are.
        one = runtime_class(f"RuntimeClass {named}", {**item, "kind": "RuntimeClass"})
        if one.trouble or one.handler in handlers:
            told.append(one)
    none = f"the cluster has none with the handler {' or '.join(handlers)}; kubectl apply -f {RUNTIME_CLASS}"
    return told or [RuntimeClass(kubeconfig, trouble=none)]


def _cluster_asked(kubeconfig: str) -> list[Any]:
    at = access(kubeconfig)
    answer = get(at, _PATH)
    if answer.status != 200:
        raise InvalidRequest(f"{at.host} answers {answer.status} {answer.reason}")
    items = answer.document.get("items")
    return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []


def _mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}
