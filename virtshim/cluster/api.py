"""The API server's objects that the programs of the cluster read and write. Each write fails if its object has changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import structlog

from virtshim.cluster.values import API_VERSION, GROUP, KIND
from virtshim.kubeapi.asking import MERGE_PATCH, STRATEGIC_PATCH, Answer, ask
from virtshim.kubeapi.event_document import event_document
from virtshim.kubeapi.kubeconfig import Access
from virtshim.model.errors import InvalidRequest, PermissionRefused, ShimError, Unavailable
from virtshim.system.clock import Clock

log = structlog.get_logger(__name__)

Document = Mapping[str, Any]

VIRTUAL_MACHINES: Final = f"/apis/{GROUP}/v1alpha1"
VMS: Final = f"{VIRTUAL_MACHINES}/virtualmachines"
PODS: Final = "/api/v1/pods"
NODES: Final = "/api/v1/nodes"
BUDGETS: Final = "/apis/policy/v1/poddisruptionbudgets"
LEASES: Final = "/apis/coordination.k8s.io/v1"
GUIDE: Final = "docs/cluster.md, Permissions"
# The words of rights, by method.
_VERBS: Final = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}


class ConflictFound(Exception):
    """The object has changed since it was read, or there is one of that name already."""


class GoneFound(LookupError):
    """There is no such object."""


def below(path: str, namespace: str, name: str = "", subresource: str = "") -> str:
    """The path of objects in a namespace. `path`: of all objects of the kind."""
    group, _, plural = path.rpartition("/")
    found = f"{group}/namespaces/{quote(namespace, safe='')}/{plural}"
    if name:
        found += f"/{quote(name, safe='')}"
    return f"{found}/{subresource}" if subresource else found


@dataclass(frozen=True, slots=True)
class Api:
    """Raises ConflictFound, GoneFound, and ShimError (the server refuses, or cannot be reached)."""

    access: Callable[[], Access]

    def get(self, path: str) -> Document:
        return self._ask("GET", path)

    def create(self, path: str, document: Document) -> Document:
        return self._ask("POST", path, document)

    def change(self, path: str, document: Document) -> Document:
        """`document`: a merge patch; with a resourceVersion, it holds for that version alone."""
        return self._ask("PATCH", path, document, MERGE_PATCH)

    def change_lists(self, path: str, document: Document) -> Document:
        """Like `change`, but lists with a key, such as conditions, are merged."""
        return self._ask("PATCH", path, document, STRATEGIC_PATCH)

    def remove(self, path: str, options: Document) -> Document:
        """Returns the object while it ends."""
        return self._ask("DELETE", path, options)

    def _ask(
        self, method: str, path: str, document: Document | None = None, content_type: str = "application/json"
    ) -> Document:
        verb = _VERBS[method]
        try:
            answer = ask(self.access(), method, path, document, content_type)
        except (OSError, ValueError, InvalidRequest) as exc:
            why = " ".join(str(exc).split())[:300]
            raise Unavailable(f"the API server cannot be asked to {verb} {path}: {why}") from None
        if answer.status in (200, 201, 202):
            return answer.document
        raise _refusal(answer, verb, path)


def _refusal(answer: Answer, verb: str, path: str) -> Exception:
    message = str(answer.document.get("message") or answer.reason)[:500]
    if answer.status == 409:
        return ConflictFound(message)
    if answer.status == 404:
        return GoneFound(message)
    if answer.status in (401, 403):
        return PermissionRefused(f"the API server refuses to {verb} {path}: {message} ({GUIDE})")
    if answer.status in (400, 422):
        return InvalidRequest(message)
    return Unavailable(f"the API server answers {answer.status} to {verb} {path}: {message}")


@dataclass(frozen=True, slots=True)
class Notices:
    """Events of objects of one kind, which `kubectl describe` shows. One that cannot be sent is logged instead."""

    api: Api
    clock: Clock
    component: str
    api_version: str = API_VERSION
    kind: str = KIND

    def tell(self, about: Document, reason: str, message: str, *, is_warning: bool) -> None:
        metadata = about["metadata"]
        involved = {name: metadata[name] for name in ("namespace", "name", "uid")}
        involved |= {"apiVersion": self.api_version, "kind": self.kind}
        at = self.clock.now_ns() / 1e9
        document = event_document(involved, reason, message, at, self.component, is_warning=is_warning)
        try:
            self.api.create(f"/api/v1/namespaces/{quote(metadata['namespace'], safe='')}/events", document)
        except (ShimError, ConflictFound, GoneFound) as exc:
            log.warning("event.unsent", about=metadata["name"], reason=reason, message=message, error=str(exc))
