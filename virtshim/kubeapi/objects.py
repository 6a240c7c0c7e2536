"""Reads Secrets and ConfigMaps that pods name, and asks the API server about virtshim's rights."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from virtshim.kubeapi.asking import USUAL, Answer, RequestLimits, ask, get
from virtshim.kubeapi.kubeconfig import Access, access
from virtshim.model.errors import InvalidRequest, PermissionRefused, ShimError, Unavailable, WrongState
from virtshim.seed.sources import Data, DataSource

PLURAL: Final = {"secret": "secrets", "configmap": "configmaps"}
GUIDE: Final = "docs/security.md, Secrets by name"


class KubeObjects:
    """Implements `virtshim.kubeapi.ports.ClusterObjects`. Reads the kubeconfig and its files at each call, because other programs
    renew tokens and certificates."""

    def __init__(self, kubeconfig: str, limits: RequestLimits = USUAL) -> None:
        """`kubeconfig`: "" to ask no API server."""
        self._kubeconfig = kubeconfig
        self._limits = limits

    def use(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig

    def read(self, source: DataSource, namespace: str) -> Data:
        kubeconfig = self._kubeconfig
        if not kubeconfig:
            raise WrongState(
                "this node does not read Secrets and ConfigMaps by name: its operator must set kubernetes.kubeconfig; or mount "
                "it as a volume, or write its text into an annotation of the pod"
            )
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/{PLURAL[source.kind]}/{quote(source.name, safe='')}"
        try:
            answer = get(access(kubeconfig, verified=True), path, self._limits)
        except (OSError, ValueError, InvalidRequest) as exc:
            why = " ".join(str(exc).split())[:300]
            raise Unavailable(f"the API server cannot be asked (kubernetes.kubeconfig {kubeconfig}): {why}") from None
        if answer.status != 200:
            raise _refusal(answer)
        return _data(answer.document, source)


def _refusal(answer: Answer) -> ShimError:
    if answer.status == 404:
        return WrongState("it does not exist in the pod's namespace; create it, or correct the annotation")
    if answer.status in (401, 403):
        return PermissionRefused(
            f"this node may not read it ({answer.status} {answer.reason}); name it in a volume of the pod as well, or grant "
            f"this node the right to get it ({GUIDE})"
        )
    return Unavailable(f"the API server answers {answer.status} {answer.reason}; the next attempt asks again")


def _data(document: Mapping[str, Any], source: DataSource) -> Data:
    found: dict[str, bytes] = {}
    encoded = mapping(document, "binaryData") if source.kind == "configmap" else mapping(document, "data")
    if source.kind == "configmap":
        found |= {key: str(text).encode(errors="replace") for key, text in mapping(document, "data").items()}
    try:
        found |= {key: base64.b64decode(str(text), validate=True) for key, text in encoded.items()}
    except binascii.Error:
        raise Unavailable("the API server's answer is malformed: its data are not base64") from None
    return found


def mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object in that field; empty if the field is missing or is something else."""
    found = document.get(name)
    return found if isinstance(found, dict) else {}


# https://kubernetes.io/docs/reference/kubernetes-api/authorization-resources/self-subject-access-review-v1/
_PATH: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def may(access: Access, verb: str, resource: str, namespace: str = "", name: str = "") -> bool:
    """Asks whether this user has a right; changes nothing. `verb`: such as get; `resource`: such as secrets. `namespace`, `name`:
    "" for all. Raises ShimError if the server refuses to answer; OSError and ValueError as `get`."""
    wanted = {"verb": verb, "resource": resource, "namespace": namespace, "name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in wanted.items() if value}},
    }
    answer = ask(access, "POST", _PATH, review)
    if answer.status == 401:
        raise PermissionRefused("it does not know the kubeconfig's user (401); renew the user's token or certificate")
    if answer.status == 403:
        raise PermissionRefused(
            "it does not tell the user its rights (403); bind the ClusterRole system:basic-user to the user"
        )
    if answer.status not in (200, 201):
        raise Unavailable(
            f"it answers {answer.status} {answer.reason}; check that it is an API server, and see its log"
        )
    return mapping(answer.document, "status").get("allowed") is True
