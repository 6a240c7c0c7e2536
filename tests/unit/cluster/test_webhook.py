"""The webhook refuses whatever is no proper question, and renews its certificate."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest
from fakes.kubernetes_api import KubernetesApi

from virtshim.cluster.controller import Controller
from virtshim.cluster.evictions import Answer
from virtshim.cluster.serving_certificate import serving_certificate, trusted
from virtshim.cluster.webhook import Webhook, review
from virtshim.model.errors import Unavailable


def asked(**changes: Any) -> dict[str, Any]:
    request = {"uid": "u", "subResource": "eviction", "namespace": "shop", "name": "db-1", "object": {}, **changes}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


class Evicted:
    def __init__(self, answer: Answer | Exception) -> None:
        self.answer = answer
        self.dry: list[bool] = []

    def __call__(self, namespace: str, name: str, *, dry_run: bool) -> Answer:
        self.dry.append(dry_run)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_refusal_makes_kubectl_ask_again() -> None:
    response = review(asked(), Evicted(Answer(False, "it moves")))["response"]
    assert (response["uid"], response["allowed"]) == ("u", False)
    assert (response["status"]["code"], response["status"]["message"]) == (429, "it moves")


def test_no_answer_is_no_permission() -> None:
    response = review(asked(), Evicted(Unavailable("the API server is away")))["response"]
    assert (response["allowed"], response["status"]["code"]) == (False, 429)
    assert "the API server is away" in response["status"]["message"]


@pytest.mark.parametrize("changes", [{"subResource": "exec"}, {"name": ""}, {"name": 3}])
def test_what_is_no_eviction_is_allowed_without_a_look(changes: dict[str, Any]) -> None:
    evicted = Evicted(Answer(False))
    assert review(asked(**changes), evicted)["response"]["allowed"] is True
    assert evicted.dry == []


@pytest.mark.parametrize("changes", [{"dryRun": True}, {"object": {"deleteOptions": {"dryRun": ["All"]}}}])
def test_a_dry_run_is_one_by_the_request_or_by_its_options(changes: dict[str, Any]) -> None:
    evicted = Evicted(Answer(True))
    review(asked(**changes), evicted)
    assert evicted.dry == [True]


def connected(webhook: Webhook) -> ssl.SSLSocket:
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return tls.wrap_socket(socket.create_connection(("127.0.0.1", webhook.port), timeout=10))


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/other", b"{}", {}, 404),
        ("/evictions", b"", {"Content-Length": str(1 << 30)}, 400),
    ],
)
def test_a_request_that_is_no_question_is_refused(
    api: KubernetesApi,
    controller_of: Callable[..., Controller],
    webhook_of: Callable[[Controller], Webhook],
    path: str,
    body: bytes,
    headers: dict[str, str],
    status: int,
) -> None:
    webhook = webhook_of(controller_of())
    connection = http.client.HTTPConnection("127.0.0.1", webhook.port)
    connection.sock = connected(webhook)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    assert answer.status == status
    assert json.loads(answer.read())["message"]
    connection.close()


def test_an_answer_is_sent_in_one_piece(
    api: KubernetesApi, controller_of: Callable[..., Controller], webhook_of: Callable[[Controller], Webhook]
) -> None:
    """Its body would otherwise wait for the API server's word that it has the headers: 40 ms."""
    with connected(webhook_of(controller_of())) as connection:
        body = json.dumps(asked()).encode()
        connection.sendall(b"POST /evictions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head, _, answer = connection.recv(1 << 16).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(answer)["response"]["allowed"] is True


def test_a_peer_that_does_not_shake_hands_keeps_nobody_waiting(
    api: KubernetesApi, controller_of: Callable[..., Controller], webhook_of: Callable[[Controller], Webhook]
) -> None:
    webhook = webhook_of(controller_of())
    with socket.create_connection(("127.0.0.1", webhook.port)), connected(webhook) as connection:
        connection.sendall(b"POST /other HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")


def test_slow_peers_keep_nobody_out(
    api: KubernetesApi, controller_of: Callable[..., Controller], webhook_of: Callable[[Controller], Webhook]
) -> None:
    """Half of them have shaken hands and sent the beginning of a request."""
    webhook = webhook_of(controller_of())
    with contextlib.ExitStack() as closing:
        for _ in range(40):
            closing.enter_context(socket.create_connection(("127.0.0.1", webhook.port)))
            closing.enter_context(connected(webhook)).sendall(b"POST /evictions HTTP/1.1\r\n")
        with connected(webhook) as connection:
            connection.sendall(b"POST /other HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("body", [b"no JSON", b"[" * 100_000])
def test_a_body_that_is_no_json_is_refused(
    body: bytes,
    api: KubernetesApi,
    controller_of: Callable[..., Controller],
    webhook_of: Callable[[Controller], Webhook],
) -> None:
    with connected(webhook_of(controller_of())) as connection:
        connection.sendall(b"POST /evictions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400")


def test_a_bundle_keeps_the_newest_certificates_and_the_own_one_once() -> None:
    texts = [serving_certificate("a.b.svc", 1_700_000_000.0 + number).text for number in range(4)]
    bundle = ""
    for text in [*texts, texts[3]]:
        bundle = trusted(bundle, text)
    assert [text.strip() in bundle for text in texts] == [False, True, True, True]
    assert bundle.count("BEGIN") == 3


def test_a_certificate_is_renewed_before_its_end() -> None:
    made = serving_certificate("a.b.svc", 1_700_000_000.0)
    assert made.renew_at == 1_700_000_000.0 + 60 * 86400
