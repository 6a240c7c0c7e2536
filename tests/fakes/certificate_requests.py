"""Handles CertificateSigningRequests as the API server does: it writes who has asked, each subresource changes its own
part of the status, and a decision is final.

https://kubernetes.io/docs/reference/kubernetes-api/authentication-resources/certificate-signing-request-v1/"""

from __future__ import annotations

import base64
from typing import Any

from cryptography import x509

Document = dict[str, Any]

KIND = "CertificateSigningRequest"
# The verb that the user must have for the signer, by subresource.
VERBS = {"approval": "approve", "status": "sign"}
_DECISIONS = ("Approved", "Denied")


def faults(document: Document) -> list[str]:
    spec, found = document["spec"], []
    try:
        x509.load_pem_x509_csr(base64.b64decode(spec.get("request", "")))
    except ValueError:
        found.append("spec.request: Invalid value: PEM block type must be CERTIFICATE REQUEST")
    if not spec.get("usages"):
        found.append("spec.usages: Required value")
    if "/" not in spec.get("signerName", ""):
        found.append("spec.signerName: Invalid value: must be a fully qualified domain and path")
    if spec.get("expirationSeconds", 600) < 600:
        found.append("spec.expirationSeconds: Invalid value: may not specify a duration less than 600 seconds")
    return found


def changed(before: Document, after: Document, sub: str) -> Document:
    """What the subresource takes of the change."""
    had, has = before.get("status", {}), after.get("status", {})
    conditions = has.get("conditions", [])
    if sub == "approval":
        return {**before, "metadata": after["metadata"], "status": {**had, "conditions": conditions}}
    if sub == "status":
        kept = [one for one in had.get("conditions", ()) if one["type"] in _DECISIONS]
        others = [one for one in conditions if one["type"] not in _DECISIONS]
        return {**before, "metadata": after["metadata"], "status": {**has, "conditions": [*kept, *others]}}
    return {**after, "spec": before["spec"], "status": had}


def wrong_changes(before: Document, after: Document, sub: str) -> list[str]:
    had, has = before.get("status", {}), after.get("status", {})
    types = {one["type"] for one in has.get("conditions", ())}
    found = []
    if set(_DECISIONS) <= types:
        found.append("status.conditions: Invalid value: Approved and Denied conditions are mutually exclusive")
    lost = {one["type"] for one in had.get("conditions", ())} - types
    if sub == "approval" and lost:
        found.append(f"status.conditions: Forbidden: updates may not remove a condition of type {lost}")
    if any(one["status"] != "True" for one in has.get("conditions", ()) if one["type"] in (*_DECISIONS, "Failed")):
        found.append("status.conditions: Unsupported value")
    if had.get("certificate") not in (None, has.get("certificate")):
        found.append("status.certificate: Forbidden: updates may not set or modify a certificate value once it is set")
    elif has.get("certificate"):
        try:
            x509.load_pem_x509_certificates(base64.b64decode(has["certificate"]))
        except ValueError:
            found.append("status.certificate: Invalid value")
    return found
