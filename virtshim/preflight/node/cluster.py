"""The cluster's RuntimeClasses, asked with a kubeconfig: for `virtshim check --kubeconfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, Final

from virtshim.domain.errors import InvalidRequest
from virtshim.kubeapi.asking import get
from virtshim.kubeapi.kubeconfig import access
from virtshim.preflight.node.overhead import RUNTIME_CLASS, RuntimeClass, runtime_class

_PATH: Final = "/apis/node.k8s.io/v1/runtimeclasses"


def runtime_classes(kubeconfig: str, handlers: Sequence[str]) -> list[RuntimeClass]:
    """Those with one of the handlers; one with `trouble` if the cluster has none, or cannot be asked."""
    try:
        found = _asked(kubeconfig)
    except (OSError, HTTPException, ValueError, InvalidRequest) as exc:
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


def _asked(kubeconfig: str) -> list[Any]:
    at = access(kubeconfig)
    answer = get(at, _PATH)
    if answer.status != 200:
        raise InvalidRequest(f"{at.host} answers {answer.status} {answer.reason}")
    items = answer.document.get("items")
    return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []


def _mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}
