"""virtshim logs in at a registry by password or token, and sends a login only where it may go."""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest

from virtshim.model.errors import InvalidRequest, PermissionRefused
from virtshim.model.image import Credentials

BASIC = "Basic " + base64.b64encode(b"me:hunter2").decode()


def guard(web: Any, challenge: str, accepted: str) -> None:
    """All of the registry now wants this Authorization header."""
    for path, route in list(web.routes.items()):

        def guarded(request: Any, route: Any = route) -> None:
            if request.headers.get("Authorization") == accepted:
                route(request)
                return
            request.send_response(401)
            request.send_header("WWW-Authenticate", challenge)
            request.send_header("Content-Length", "0")
            request.end_headers()

        web.routes[path] = guarded


@pytest.mark.parametrize(
    "credentials",
    [
        Credentials("me", "hunter2"),
        Credentials(auth=base64.b64encode(b"me:hunter2").decode()),
        Credentials(auth=base64.b64encode(b"me:hunter2\0").decode()),
        Credentials("me", "hunter2", server_address="http://127.0.0.1"),
    ],
)
def test_a_password_is_sent_when_requested(fake_registry, web, pull, qcow2: bytes, credentials: Credentials) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    guard(web, 'Basic realm="r"', BASIC)
    assert pull(name, credentials).size == len(qcow2)
    assert "Authorization" not in web.seen[0][1]


@pytest.mark.parametrize(
    ("credentials", "why"),
    [
        (None, "wants a login"),
        (Credentials(), "refuses the given login"),
        (Credentials("me", "hunter3"), "refuses the given login"),
        (Credentials("me", "hunter2", server_address="https://other.example"), "for another server"),
    ],
)
def test_a_wrong_login_is_refused_without_repeating_it(
    fake_registry, web, pull, qcow2: bytes, credentials: Credentials | None, why: str
) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    guard(web, 'Basic realm="r"', BASIC)
    with pytest.raises(PermissionRefused, match=why) as caught:
        pull(name, credentials)
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("auth", ["!!", base64.b64encode(b"no colon").decode()])
def test_an_invalid_auth_field_is_refused_without_repeating_it(fake_registry, web, pull, qcow2, auth: str) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    guard(web, 'Basic realm="r"', BASIC)
    with pytest.raises(InvalidRequest, match="auth field") as caught:
        pull(name, Credentials(auth=auth))
    assert auth not in str(caught.value)


def token_service(web: Any, accepted: Callable[[Any, dict[str, list[str]]], bool], field: str = "token") -> str:
    def route(request: Any) -> None:
        query = urllib.parse.urlsplit(request.path).query
        if request.command == "POST":
            query = request.rfile.read(int(request.headers["Content-Length"])).decode()
        good = accepted(request, urllib.parse.parse_qs(query))
        body = json.dumps({field: "t0ken"}).encode() if good else b"{}"
        request.send_response(200 if good else 401)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    web.routes["/token"] = route
    return f'Bearer realm="{web.url("/token")}",service="reg",scope="repository:a:pull"'


def test_a_token_is_fetched_with_the_password_once(fake_registry, web, pull, qcow2: bytes) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})

    def accepted(request: Any, asked: dict[str, list[str]]) -> bool:
        right = asked == {"service": ["reg"], "scope": ["repository:a:pull"]}
        return right and request.headers.get("Authorization") == BASIC

    guard(web, f'Basic realm="also", {token_service(web, accepted)}', "Bearer t0ken")
    token_service(web, accepted)
    assert pull(name, Credentials("me", "hunter2")).size == len(qcow2)
    assert web.paths().count("/token?service=reg&scope=repository%3Aa%3Apull") == 1
    with pytest.raises(PermissionRefused, match="refuses the given login"):
        pull(name, Credentials("me", "wrong"))
    with pytest.raises(PermissionRefused, match="wants a login"):
        pull(name)


@pytest.mark.parametrize(
    ("credentials", "wanted", "field"),
    [
        (None, {}, "token"),
        (
            Credentials(identity_token="refr3sh"),
            {"grant_type": ["refresh_token"], "refresh_token": ["refr3sh"]},
            "access_token",
        ),
        (Credentials(registry_token="t0ken"), None, "token"),
    ],
)
def test_a_token_is_fetched_or_taken_from_the_request(
    fake_registry,
    web,
    pull,
    qcow2: bytes,
    credentials: Credentials | None,
    wanted: dict[str, list[str]] | None,
    field: str,
) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    challenge = token_service(web, lambda request, asked: wanted is not None and wanted.items() <= asked.items(), field)
    guard(web, challenge, "Bearer t0ken")
    token_service(web, lambda request, asked: wanted is not None and wanted.items() <= asked.items(), field)
    assert pull(name, credentials).size == len(qcow2)
    assert any(path.startswith("/token") for path in web.paths()) is (wanted is not None)


@pytest.mark.parametrize("realm", ["http://token.example/", "ftp://x/", "", "https://u:p@x/", "http://[/"])
def test_a_login_is_not_sent_where_it_could_be_read(fake_registry, web, pull, qcow2: bytes, realm: str) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    guard(web, f'Bearer realm="{realm}"', "never")
    with pytest.raises(PermissionRefused, match="not https"):
        pull(name, Credentials("me", "hunter2"))


def test_a_blob_elsewhere_is_fetched_without_the_login(fake_registry, web, pull, qcow2: bytes) -> None:
    name = fake_registry.push("a", {"disk/x": qcow2})
    for path in [path for path in web.routes if "/blobs/" in path]:
        web.routes["/store" + path] = web.routes[path]
        web.answer(path, 307, Location=f"http://localhost:{web.server_address[1]}/store{path}?sig=x")
    guard_paths = {path: route for path, route in web.routes.items() if path.startswith("/store")}
    guard(web, 'Basic realm="r"', BASIC)
    web.routes.update(guard_paths)
    assert pull(name, Credentials("me", "hunter2")).size == len(qcow2)
    elsewhere = [headers for path, headers in web.seen if path.startswith("/store")]
    assert elsewhere
    assert all("Authorization" not in headers for headers in elsewhere)
