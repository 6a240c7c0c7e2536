"""A stateful API server over TLS: versions that guard writes, watches that get too old, graceful deletion, finalizers, owners,
schema and CEL rules of VirtualMachines, and evictions that pass the webhook and then the budgets.

It is as strict as the real one where the programs of the cluster rely on it. `kubectl` can use it, too.
"""

from __future__ import annotations

import base64
import copy
import http.client
import http.server
import json
import secrets
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from fakes import certificate_requests, crd

from virtshim.system.clock import Clock, SystemClock

Document = dict[str, Any]
Key = tuple[str, str]


@dataclass(frozen=True)
class Resource:
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def prefix(self) -> str:
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"


RESOURCES = (
    Resource("", "v1", "pods", "Pod", status=True),
    Resource("", "v1", "nodes", "Node", namespaced=False, status=True),
    Resource("", "v1", "namespaces", "Namespace", namespaced=False),
    Resource("", "v1", "events", "Event"),
    Resource("", "v1", "secrets", "Secret"),
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource(
        "certificates.k8s.io", "v1", "certificatesigningrequests", "CertificateSigningRequest", False, status=True
    ),
    Resource("apps", "v1", "daemonsets", "DaemonSet"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Resource("coordination.k8s.io", "v1", "leases", "Lease"),
    Resource(
        "admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", False
    ),
    Resource("virtshim.io", "v1alpha1", "virtualmachines", "VirtualMachine", status=True),
    Resource("virtlet.k8s", "v1", "virtletimagemappings", "VirtletImageMapping"),
)


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


@dataclass
class Asked:
    """A request. `sub`: the subresource."""

    method: str
    resource: Resource
    namespace: str
    name: str
    sub: str
    query: dict[str, str]
    body: Any
    user: str = "admin"
    token: str = ""
    merges_lists: bool = False


@dataclass
class _Change:
    version: int
    plural: str
    kind: str
    document: Document
    before: Document | None = None

    def seen_by(self, asked: Asked) -> Document | None:
        """As a watch tells it. For a selector, an object that it no longer selects is gone."""
        if _wanted(asked, self.document):
            return {"type": self.kind, "object": self.document}
        if self.before is None or not _wanted(asked, self.before):
            return None
        metadata = {**self.before["metadata"], "resourceVersion": str(self.version)}
        return {"type": "DELETED", "object": {**self.before, "metadata": metadata}}


@dataclass
class KubernetesApi:
    place: Path
    objects: dict[str, dict[Key, Document]] = field(default_factory=lambda: {one.plural: {} for one in RESOURCES})
    # token -> user; what else the server knows, by token or user; and what decides what a user may do, None: everything.
    tokens: dict[str, str] = field(default_factory=lambda: {"secret": "admin"})
    extra: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    authorize: Callable[[Asked], None] | None = None
    # Is asked about each write of a user, with the object before and after it.
    admit: Callable[[Asked, Document | None, Document | None], None] | None = None
    # "NAMESPACE/NAME" of a service -> the port where it listens here.
    services: dict[str, int] = field(default_factory=dict)
    # Is called before each request; may raise Refused, or anything to cut the connection.
    before: Callable[[Asked], None] | None = None
    asked: list[str] = field(default_factory=list)
    changes: list[_Change] = field(default_factory=list)
    version: int = 100
    oldest: int = 0
    is_closing: bool = False
    # Of time stamps, and of the end of watches.
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        self.news = threading.Condition()
        self.certificate, key = self.place / "api.pem", self.place / "api.key"
        argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1",
                "-keyout", str(key), "-out", str(self.certificate)]  # fmt: skip
        subprocess.run(argv, check=True, capture_output=True, timeout=60)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.server = _Listener(("127.0.0.1", 0), _handler(self))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        # It looks this often whether it is to end: a test would wait for half of the usual 0.5 s.
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        with self.news:
            self.is_closing = True
            self.news.notify_all()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def kubeconfig(self, token: str = "secret") -> str:
        path = self.place / f"kubeconfig-{token}"
        ca = base64.b64encode(self.certificate.read_bytes()).decode()
        server = f"https://127.0.0.1:{self.server.server_address[1]}"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me"}}],
            "clusters": [{"name": "one", "cluster": {"server": server, "certificate-authority-data": ca}}],
            "users": [{"name": "me", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(document))
        return str(path)

    # --- for tests

    def put(self, plural: str, document: Document) -> Document:
        """Adds or replaces an object, without any check."""
        resource = next(one for one in RESOURCES if one.plural == plural)
        with self.news:
            key = _key(document)
            kind = "MODIFIED" if key in self.objects[plural] else "ADDED"
            return self._store(resource, kind, copy.deepcopy(document))

    def edit(self, plural: str, namespace: str, name: str, change: Callable[[Document], None]) -> None:
        """As a kubelet, an agent or a scheduler does: at once, whatever the version is."""
        with self.news:
            document = copy.deepcopy(self.objects[plural][namespace, name])
            change(document)
            self._store(next(one for one in RESOURCES if one.plural == plural), "MODIFIED", document)

    def one(self, plural: str, namespace: str, name: str) -> Document:
        with self.news:
            return copy.deepcopy(self.objects[plural][namespace, name])

    def all(self, plural: str) -> list[Document]:
        with self.news:
            return [copy.deepcopy(one) for one in self.objects[plural].values()]

    def gone(self, plural: str, namespace: str, name: str) -> None:
        """The object is away, whatever its finalizers and its grace period say."""
        with self.news:
            self._remove(next(one for one in RESOURCES if one.plural == plural), (namespace, name))

    def forget_history(self) -> None:
        """Watches from now on are too old, and those that run end."""
        with self.news:
            self.changes.clear()
            self.version += 1
            self.oldest = self.version
            self.news.notify_all()

    def evict(self, namespace: str, name: str, *, dry_run: bool = False) -> Document:
        """As `kubectl drain` asks. Returns the Status, also of a refusal."""
        resource = RESOURCES[0]
        query = {"dryRun": "All"} if dry_run else {}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
        try:
            return self.answer(Asked("POST", resource, namespace, name, "eviction", query, body))
        except Refused as exc:
            return exc.status

    # --- requests

    def answer(self, asked: Asked) -> Document:
        if self.authorize is not None and asked.user != "admin":
            self.authorize(asked)
        if asked.sub == "eviction":
            return self._evict(asked)
        with self.news:
            match asked.method:
                case "GET" if asked.name:
                    return self._found(asked)
                case "GET":
                    return self._list(asked)
                case "POST":
                    return self._create(asked)
                case "PATCH" | "PUT":
                    return self._change(asked)
                case "DELETE":
                    return self._delete(asked)
                case _:
                    raise Refused(405, "MethodNotAllowed", asked.method)

    def _found(self, asked: Asked) -> Document:
        found = self.objects[asked.resource.plural].get((asked.namespace, asked.name))
        if found is None:
            raise Refused(404, "NotFound", f'{asked.resource.plural} "{asked.name}" not found')
        return found

    def _list(self, asked: Asked) -> Document:
        found = [one for key, one in sorted(self.objects[asked.resource.plural].items()) if _wanted(asked, one)]
        start, limit = int(asked.query.get("continue", "0")), int(asked.query.get("limit", "0")) or len(found)
        metadata: Document = {"resourceVersion": str(self.version)}
        if start + limit < len(found):
            metadata["continue"] = str(start + limit)
        kind = f"{asked.resource.kind}List"
        items = found[start : start + limit]
        return {"kind": kind, "apiVersion": asked.resource.api_version, "metadata": metadata, "items": items}

    def _create(self, asked: Asked) -> Document:
        document = copy.deepcopy(asked.body)
        metadata = document.setdefault("metadata", {})
        if asked.resource.namespaced:
            metadata["namespace"] = asked.namespace
        if not metadata.get("name"):
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
        if _key(document) in self.objects[asked.resource.plural]:
            raise Refused(409, "AlreadyExists", f"{metadata['name']} already exists")
        document.setdefault("apiVersion", asked.resource.api_version)
        document.setdefault("kind", asked.resource.kind)
        if asked.resource.status:
            document.pop("status", None)
        metadata |= {"uid": secrets.token_hex(8), "creationTimestamp": self._now(), "generation": 1}
        if asked.resource.kind == certificate_requests.KIND:
            document["spec"] |= {"username": asked.user, "extra": self.extra_of(asked)}
            _refuse_if(certificate_requests.faults(document))
        document = self._checked(asked, document)
        self._admit(asked, None, document)
        if asked.resource.kind == "Pod":
            self._refuse_unrestricted(document)
            document["status"] = {"phase": "Pending"}
        return self._store(asked.resource, "ADDED", document)

    def extra_of(self, asked: Asked) -> dict[str, list[str]]:
        return self.extra.get(asked.token) or self.extra.get(asked.user, {})

    def _admit(self, asked: Asked, before: Document | None, after: Document | None) -> None:
        if self.admit is not None and asked.user != "admin":
            self.admit(asked, before, after)

    def _refuse_unrestricted(self, pod: Document) -> None:
        """PodSecurity. No pod of a test is restricted."""
        namespace = self.objects["namespaces"].get(("", pod["metadata"]["namespace"]), {"metadata": {}})
        if namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") == "restricted":
            name = pod["metadata"]["name"]
            raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest"')

    def _checked(self, asked: Asked, document: Document) -> Document:
        """As it is stored."""
        if asked.resource.kind != "VirtualMachine":
            return document
        if asked.query.get("fieldValidation") == "Strict" and (unknown := crd.unknown(document)):
            raise Refused(400, "BadRequest", f"strict decoding error: {', '.join(unknown)}")
        if faults := crd.broken_rules(document):
            raise Refused(422, "Invalid", "; ".join(faults))
        stored: Document = crd.pruned(crd.defaulted(document))
        return stored

    def _change(self, asked: Asked) -> Document:
        before = self._found(asked)
        body = _with_other_conditions(before, asked.body) if asked.merges_lists else asked.body
        after: Document = copy.deepcopy(body) if asked.method == "PUT" else merged(before, body)
        had = before["metadata"]
        _refuse_other_version(had, after["metadata"])
        if asked.resource.kind == certificate_requests.KIND:
            after = certificate_requests.changed(before, after, asked.sub)
            _refuse_if(certificate_requests.wrong_changes(before, after, asked.sub))
        elif asked.resource.status:
            if asked.sub == "status":
                after = {**before, "status": after.get("status", {}), "metadata": had}
            else:
                after = {**after, "status": before.get("status", {})}
        after["metadata"] = {**after["metadata"], "uid": had["uid"], "creationTimestamp": had["creationTimestamp"]}
        if "deletionTimestamp" in had:
            after["metadata"]["deletionTimestamp"] = had["deletionTimestamp"]
        if before.get("spec") != after.get("spec"):
            after["metadata"]["generation"] = had.get("generation", 1) + 1
        if asked.resource.kind == "Pod":
            _refuse_new_gates(before, after)
        after = self._checked(asked, after)
        self._admit(asked, before, after)
        if after == before:
            return before
        if "deletionTimestamp" in had and not after["metadata"].get("finalizers") and asked.resource.kind != "Pod":
            self._remove(asked.resource, _key(after))
            return after
        return self._store(asked.resource, "MODIFIED", after)

    def _delete(self, asked: Asked) -> Document:
        found = self._found(asked)
        wanted = (asked.body or {}).get("preconditions") or {}
        for name in ("uid", "resourceVersion"):
            if wanted.get(name) not in (None, found["metadata"][name]):
                raise Refused(409, "Conflict", f"the {name} in the precondition does not match")
        self._admit(asked, found, None)
        return self._end(asked.resource, found, grace=(asked.body or {}).get("gracePeriodSeconds"))

    def _end(self, resource: Resource, found: Document, grace: int | None = None) -> Document:
        runs = resource.kind == "Pod" and bool(found["spec"].get("nodeName")) and grace != 0
        is_over = found.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if (runs and not is_over) or found["metadata"].get("finalizers"):
            if "deletionTimestamp" in found["metadata"]:
                return found
            after = copy.deepcopy(found)
            seconds = found.get("spec", {}).get("terminationGracePeriodSeconds", 30)
            after["metadata"] |= {"deletionTimestamp": self._now(), "deletionGracePeriodSeconds": seconds}
            return self._store(resource, "MODIFIED", after)
        self._remove(resource, _key(found))
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    # --- evictions

    def _evict(self, asked: Asked) -> Document:
        with self.news:
            pod = copy.deepcopy(self._found(asked))
        self._ask_webhooks(asked)
        with self.news:
            pod = self._found(asked)
            if pod["status"].get("phase") not in ("Pending", "Succeeded", "Failed"):
                self._ask_budgets(pod)
            if "dryRun" not in asked.query:
                self._end(asked.resource, pod)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}

    def _ask_budgets(self, pod: Document) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            return
        for budget in self.objects["poddisruptionbudgets"].values():
            labels = budget["spec"]["selector"]["matchLabels"]
            if budget["metadata"]["namespace"] != pod["metadata"]["namespace"] or not _has(pod, labels):
                continue
            own = [one for one in self.objects["pods"].values() if _has(one, labels)]
            healthy = sum(_is_ready(one) and "deletionTimestamp" not in one["metadata"] for one in own)
            wanted = budget["spec"]["minAvailable"]
            if (not _is_ready(pod) and healthy >= wanted > 0) or healthy > wanted:
                continue
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            raise Refused(429, "TooManyRequests", message)

    def _ask_webhooks(self, asked: Asked) -> None:
        with self.news:
            found = copy.deepcopy(list(self.objects["validatingwebhookconfigurations"].values()))
        for webhook in (one for configuration in found for one in configuration["webhooks"]):
            if not any("pods/eviction" in rule["resources"] for rule in webhook["rules"]):
                continue
            try:
                response = self._call(webhook, asked)
            except (OSError, ValueError, http.client.HTTPException) as exc:
                if webhook["failurePolicy"] == "Ignore":
                    continue
                raise Refused(500, "InternalError", f"failed calling webhook: {exc}") from exc
            if not response["allowed"]:
                status = response.get("status", {})
                message = f'admission webhook "{webhook["name"]}" denied the request: {status.get("message", "")}'
                raise Refused(status.get("code", 403), status.get("reason", "Forbidden"), message)

    def _call(self, webhook: Document, asked: Asked) -> Document:
        service = webhook["clientConfig"]["service"]
        bundle = base64.b64decode(webhook["clientConfig"].get("caBundle", "")).decode()
        tls = ssl.create_default_context(cadata=bundle) if bundle else ssl.create_default_context()
        host = f"{service['name']}.{service['namespace']}.svc"
        port = self.services.get(f"{service['namespace']}/{service['name']}", 1)
        limit = float(webhook.get("timeoutSeconds", 10))
        request = {
            "uid": secrets.token_hex(4),
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "subResource": "eviction",
            "operation": "CREATE",
            "namespace": asked.namespace,
            "name": asked.name,
            "object": asked.body,
            "dryRun": "dryRun" in asked.query,
        }
        with socket.create_connection(("127.0.0.1", port), timeout=limit) as plain:
            connection = http.client.HTTPConnection(host, timeout=limit)
            connection.sock = tls.wrap_socket(plain, server_hostname=host)
            body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
            connection.request("POST", service["path"], body, {"Content-Type": "application/json"})
            found: Document = json.loads(connection.getresponse().read())
            connection.close()
        assert found["response"]["uid"] == request["uid"]
        response: Document = found["response"]
        return response

    # --- objects and their history; the lock is held

    def _now(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.clock.now_ns() / 1e9))

    def _store(self, resource: Resource, kind: str, document: Document) -> Document:
        self.version += 1
        document.setdefault("apiVersion", resource.api_version)
        document.setdefault("kind", resource.kind)
        document["metadata"]["resourceVersion"] = str(self.version)
        document["metadata"].setdefault("uid", secrets.token_hex(8))
        document["metadata"].setdefault("creationTimestamp", self._now())
        before = self.objects[resource.plural].get(_key(document))
        self.objects[resource.plural][_key(document)] = document
        self.changes.append(_Change(self.version, resource.plural, kind, document, before))
        self.news.notify_all()
        return document

    def _remove(self, resource: Resource, key: Key) -> None:
        document = copy.deepcopy(self.objects[resource.plural].pop(key))
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        self.changes.append(_Change(self.version, resource.plural, "DELETED", document))
        self.news.notify_all()
        for other in RESOURCES:  # what it owns goes, too
            for owned in list(self.objects[other.plural].values()):
                owners = owned["metadata"].get("ownerReferences", ())
                if any(one["uid"] == document["metadata"]["uid"] for one in owners):
                    self._end(other, owned)

    def watched(self, asked: Asked) -> Iterator[Document]:
        at, until = int(asked.query["resourceVersion"]), self.clock.monotonic() + int(asked.query["timeoutSeconds"])
        while True:
            with self.news:
                if at < self.oldest:
                    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                    found = [{"type": "ERROR", "object": status}]
                else:
                    changes = [one for one in self.changes if one.version > at and one.plural == asked.resource.plural]
                    found = [told for one in changes if (told := one.seen_by(asked)) is not None]
                    at = max((one.version for one in changes), default=at)
                if not found:
                    self.news.wait(0.5)
                    if self.is_closing or self.clock.monotonic() > until:
                        return
            yield from found
            if found and found[-1]["type"] == "ERROR":
                return


def merged(before: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    made = copy.deepcopy(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), value)
    return made


def _with_other_conditions(before: Document, patch: Document) -> Document:
    """A strategic merge patch merges conditions by their type."""
    if "conditions" not in patch.get("status", {}):
        return patch
    named = {one["type"]: one for one in before.get("status", {}).get("conditions", ())}
    named |= {one["type"]: one for one in patch.get("status", {}).get("conditions", ())}
    return {**patch, "status": {**patch["status"], "conditions": list(named.values())}}


def _refuse_if(faults: list[str]) -> None:
    if faults:
        raise Refused(422, "Invalid", "; ".join(faults))


def _refuse_other_version(had: Document, has: Document) -> None:
    for name, reason in (("uid", "it is another object"), ("resourceVersion", "the object has been modified")):
        if has.get(name) not in (None, "", had[name]):
            raise Refused(409, "Conflict", f"Operation cannot be fulfilled on {had['name']}: {reason}")


def _refuse_new_gates(before: Document, after: Document) -> None:
    had = [one["name"] for one in before["spec"].get("schedulingGates", ())]
    has = [one["name"] for one in after["spec"].get("schedulingGates", ())]
    if not set(has) <= set(had):
        raise Refused(422, "Invalid", "spec.schedulingGates: only deletion is allowed")


def _key(document: Document) -> Key:
    return document["metadata"].get("namespace", ""), document["metadata"]["name"]


def _has(document: Document, labels: dict[str, str]) -> bool:
    own: dict[str, str] = document["metadata"].get("labels", {})
    return labels.items() <= own.items()


def _is_ready(pod: Document) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))


def _wanted(asked: Asked, document: Document) -> bool:
    if asked.namespace and document["metadata"].get("namespace", "") != asked.namespace:
        return False
    label, _, value = asked.query.get("labelSelector", "").partition("=")
    labels = document["metadata"].get("labels", {})
    if label and (label not in labels or (value and labels[label] != value)):
        return False
    name, _, value = asked.query.get("fieldSelector", "").partition("=")
    here: Any = document
    for part in name.split(".") if name else ():
        here = here.get(part, "")
    return not name or here == value


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients may go away."""


def _handler(api: KubernetesApi) -> type[http.server.BaseHTTPRequestHandler]:  # noqa: C901
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # An answer is two packets. Otherwise the second one waits for 40 ms, until the client has said that it has the first one.
        disable_nagle_algorithm = True

        def _any(self) -> None:
            address = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            query = {name: values[0] for name, values in parse_qs(address.query).items()}
            api.asked.append(f"{self.command} {self.path}")
            try:
                if token not in api.tokens:
                    raise Refused(401, "Unauthorized", "Unauthorized")  # noqa: TRY301
                if (found := _discovered(address.path)) is not None:
                    self._reply(200, found)
                    return
                asked = _asked(self.command, address.path, query, body)
                asked.user, asked.token = api.tokens[token], token
                asked.merges_lists = "strategic" in (self.headers.get("Content-Type") or "")
                asked.merges_lists &= asked.sub in ("status", "approval")
                if api.before is not None:
                    api.before(asked)
                if query.get("watch") in ("true", "1"):
                    self._stream(asked)
                    return
                self._reply(201 if self.command == "POST" else 200, api.answer(asked))
            except Refused as exc:
                self._reply(exc.code, exc.status)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _any  # noqa: N815

        def _reply(self, code: int, document: Document) -> None:
            text = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _stream(self, asked: Asked) -> None:
            if api.authorize is not None and asked.user != "admin":
                api.authorize(asked)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in api.watched(asked):
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            """Logs nothing to standard error."""

    return Handler


def _asked(method: str, path: str, query: dict[str, str], body: Any) -> Asked:
    for resource in RESOURCES:
        rest = path.removeprefix(f"{resource.prefix}/").split("/")
        if not path.startswith(f"{resource.prefix}/"):
            continue
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        if rest[0] == resource.plural:
            name, sub = (*rest[1:], "", "")[:2]
            return Asked(method, resource, namespace, name, sub, query, body)
    raise Refused(404, "NotFound", f"the server could not find the requested resource {path}")


def _discovered(path: str) -> Document | None:
    """What kubectl asks first."""
    if path == "/version":
        return {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    groups = sorted({(one.group, one.version) for one in RESOURCES if one.group})
    if path == "/apis":
        versions = [(group, {"groupVersion": f"{group}/{version}", "version": version}) for group, version in groups]
        found = [{"name": group, "versions": [one], "preferredVersion": one} for group, one in versions]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
    own = [one for one in RESOURCES if one.prefix == path]
    if not own:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources: list[Document] = [
        {
            "name": one.plural,
            "singularName": one.kind.lower(),
            "namespaced": one.namespaced,
            "kind": one.kind,
            "verbs": verbs,
        }
        for one in own
    ]
    if path == "/api/v1":
        eviction = {
            "name": "pods/eviction",
            "singularName": "",
            "namespaced": True,
            "kind": "Eviction",
            "verbs": ["create"],
        }
        resources.append({**eviction, "group": "policy", "version": "v1"})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": own[0].api_version, "resources": resources}
