"""What virtshim may do to objects of the API server: the server is asked, and changes nothing for it.

https://kubernetes.io/docs/reference/kubernetes-api/authorization-resources/self-subject-access-review-v1/
"""

from __future__ import annotations

from typing import Final

from virtshim.domain.errors import PermissionRefused, Unavailable
from virtshim.kubeapi.asking import post
from virtshim.kubeapi.kubeconfig import Access

_PATH: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def may(access: Access, verb: str, resource: str, namespace: str = "", name: str = "") -> bool:
    """`verb`: such as get; `resource`: such as secrets. `namespace`, `name`: "" for all. Raises ShimError if the server does not
    say; OSError, HTTPException, ValueError as `get`."""
    wanted = {"verb": verb, "resource": resource, "namespace": namespace, "name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in wanted.items() if value}},
    }
    answer = post(access, _PATH, review)
    if answer.status == 401:
        raise PermissionRefused(
            "it does not know who asks (401); renew the token or the certificate of the kubeconfig's user"
        )
    if answer.status == 403:
        raise PermissionRefused(
            "it does not tell what its user may do (403); bind the ClusterRole system:basic-user to it"
        )
    if answer.status not in (200, 201):
        raise Unavailable(f"it answers {answer.status} {answer.reason}; see whether it is an API server, and its log")
    status = answer.document.get("status")
    return isinstance(status, dict) and status.get("allowed") is True
