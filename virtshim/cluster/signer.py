"""Signs the certificates by which nodes know each other, for agents that ask by the CertificateSigningRequest API.

https://kubernetes.io/docs/reference/access-authn-authz/certificate-signing-requests/
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

import structlog

from virtshim.cluster.api import Api, ConflictFound, Document, GoneFound, below
from virtshim.cluster.node_ca import CA_NAME, CA_TEXT, SIGNER, NodeCa, NodeRequest, NotRight, read_request
from virtshim.cluster.reading import part, parts, text
from virtshim.kubeapi.kubeconfig import Access
from virtshim.kubeapi.watching import Collection
from virtshim.model.errors import ShimError
from virtshim.system.clock import Clock
from virtshim.system.rate_limits import TroubleLog
from virtshim.system.threads import lasting

log = structlog.get_logger(__name__)

REQUESTS: Final = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
CONFIG_MAPS: Final = "/api/v1/configmaps"
_SECRETS: Final = "/api/v1/secrets"
# Seconds: between looks at the CA; until the next look after an error.
_LOOK: Final = 60.0
_AGAIN: Final = 5.0


class Signer:
    """Keeps nothing: the CA is in a Secret, which is read anew for each look. Two at once do no harm: one makes the CA, and each
    request is answered by a write that holds for one version of it."""

    def __init__(self, access: Callable[[], Access], clock: Clock, namespace: str) -> None:
        """`namespace`: of the agents, the Secret and the ConfigMap."""
        self._api = Api(access)
        self._clock = clock
        self._secret = below(_SECRETS, namespace, CA_NAME)
        self._map = below(CONFIG_MAPS, namespace, CA_NAME)
        self._agent = f"system:serviceaccount:{namespace}:virtshim-agent"
        self._news = threading.Event()
        self._is_closing = False
        self._failures = TroubleLog(log, over="certificates.signed_again")
        self._requests = Collection(access, REQUESTS, self._noticed, clock, fields=f"spec.signerName={SIGNER}")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises Unavailable."""
        self._requests.start_and_list()
        self._thread = lasting(self._run, "certificates")

    def close(self) -> None:
        self._is_closing = True
        self._news.set()
        self._requests.close()
        if self._thread is not None:
            self._thread.join(_AGAIN)

    def _noticed(self, _document: Document) -> None:
        self._news.set()

    def _run(self) -> None:
        wait = 0.0
        while True:
            if self._clock.wait(self._news, wait):
                self._news.clear()
            if self._is_closing:
                return
            wait = _LOOK if self._looked() else _AGAIN

    def _looked(self) -> bool:
        """Whether nothing is left to do."""
        try:
            ca = self._ca()
            self._publish(ca)
        except (ConflictFound, GoneFound):  # another controller was faster
            return False
        except ShimError as exc:
            remedy = "see docs/cluster.md, Node certificates"
            self._failures.met("certificates.ca_failed", key="ca", error=str(exc), remedy=remedy)
            return False
        self._failures.over(key="ca")
        found = self._requests.all()
        self._failures.retain_only(one["metadata"]["name"] for one in found)
        done = [self._tried(one, ca) for one in found]
        return all(done)

    def _tried(self, document: Document, ca: NodeCa) -> bool:
        name = document["metadata"]["name"]
        try:
            self._settle(document, ca)
        except ConflictFound:
            return False
        except GoneFound:
            self._requests.found_gone("", name, document["metadata"]["uid"])
        except ShimError as exc:
            self._failures.met("certificates.not_signed", key=name, request=name, error=str(exc))
            return False
        except Exception:  # the other requests continue
            log.exception("certificates.broken", request=name)
            return False
        self._failures.over(key=name)
        return True

    def _now(self) -> float:
        return self._clock.now_ns() / 1e9

    # --- the CA

    def _ca(self) -> NodeCa:
        now = self._now()
        try:
            found = self._api.get(self._secret)
        except GoneFound:
            document = {
                "metadata": {"name": CA_NAME},
                "type": "kubernetes.io/tls",
                "data": NodeCa.new(now).data,
            }
            found = self._api.create(self._secret.rpartition("/")[0], document)
            log.warning(
                "certificates.ca_made", secret=CA_NAME, remedy="nodes get certificates of the new CA by themselves"
            )
        ca = NodeCa.of(found)
        if ca.is_old(now):
            ca = ca.renewed(now)
            version = text(found["metadata"], "resourceVersion")
            self._api.change(self._secret, {"metadata": {"resourceVersion": version}, "data": ca.data})
            log.info("certificates.ca_renewed", secret=CA_NAME)
        return ca

    def _publish(self, ca: NodeCa) -> None:
        """Comes before the first certificate of a new CA, so that its agent finds the CA."""
        wanted = {CA_TEXT: ca.text}
        try:
            found = self._api.get(self._map)
        except GoneFound:
            self._api.create(self._map.rpartition("/")[0], {"metadata": {"name": CA_NAME}, "data": wanted})
            return
        if part(found, "data").get(CA_TEXT) != ca.text:
            version = text(found["metadata"], "resourceVersion")
            self._api.change(self._map, {"metadata": {"resourceVersion": version}, "data": wanted})

    # --- one request

    def _settle(self, document: Document, ca: NodeCa) -> None:
        status = part(document, "status")
        said = {text(one, "type") for one in parts(status, "conditions")}
        if text(status, "certificate") or said & {"Denied", "Failed"}:
            return
        try:
            request = read_request(part(document, "spec"), self._agent)
        except NotRight as exc:
            # Somebody may have approved it by hand; it is not signed either.
            kind, where = ("Failed", "status") if "Approved" in said else ("Denied", "approval")
            self._say(document, where, kind, exc.reason, str(exc))
            log.warning("certificates.denied", request=document["metadata"]["name"], reason=exc.reason, error=str(exc))
            return
        if "Approved" not in said:
            message = f"it asks for the certificate of node {request.node}, which its token is bound to"
            document = self._say(document, "approval", "Approved", "OwnNode", message)
        self._sign(document, request, ca)

    def _say(self, document: Document, where: str, kind: str, reason: str, message: str) -> Document:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message[:1024]}
        change = {"metadata": _guard(document), "status": {"conditions": [condition]}}
        written = self._api.change_lists(_path(document, where), change)
        self._requests.wrote(written, text(document["metadata"], "resourceVersion"))
        return written

    def _sign(self, document: Document, request: NodeRequest, ca: NodeCa) -> None:
        made = base64.b64encode(ca.signed(request, self._now()).encode()).decode()
        change = {"metadata": _guard(document), "status": {"certificate": made}}
        written = self._api.change(_path(document, "status"), change)
        self._requests.wrote(written, text(document["metadata"], "resourceVersion"))
        log.info("certificates.signed", node=request.node, request=document["metadata"]["name"])


def _path(document: Document, subresource: str) -> str:
    return f"{REQUESTS}/{quote(document['metadata']['name'], safe='')}/{subresource}"


def _guard(document: Document) -> dict[str, str]:
    return {name: document["metadata"][name] for name in ("uid", "resourceVersion")}
