"""With malicious or broken registries and web servers, kubelet gets a fitting error code with the reason, and nothing
stays."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fakes.registry import FakeRegistry, tar
from fakes.webserver import WebServer

pytestmark = pytest.mark.hostile

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
DENIED, AWAY = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNKNOWN

PLAIN = tar({"disk/a.img": bytes(1023) + b"\1"})
LAYER = gzip.compress(PLAIN)
NOWHERE = {"digest": f"sha256:{'1' * 64}", "size": 1}
CONFIG = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the pauses between the tries of a download."""
    monkeypatch.setattr("virtshim.images.downloads.resumed.PAUSES", (0.0, 0.0, 0.0))


def v2(**fields: Any) -> dict[str, Any]:
    return {"schemaVersion": 2, **fields}


def deep(depth: int) -> bytes:
    return b'{"schemaVersion": 2, "layers": ' + b"[" * depth + b"]" * depth + b"}"


MANIFESTS: dict[str, tuple[Any, grpc.StatusCode, str]] = {
    "no object": ([], INVALID, "not a JSON object"),
    "of Docker's first kind": ({"schemaVersion": 1, "fsLayers": []}, INVALID, "old or unknown schema"),
    "without layers": (v2(config=NOWHERE), INVALID, "no list layers"),
    "of no layer": (v2(config=NOWHERE, layers=[]), INVALID, "0 layers"),
    "of 200 layers": (v2(config=NOWHERE, layers=[NOWHERE] * 200), INVALID, "200 layers"),
    "read as two images": (v2(config=NOWHERE, layers=[NOWHERE], manifests=[NOWHERE]), INVALID, "ambiguous"),
    "a digest that leads up": (v2(config=NOWHERE, layers=[{"digest": "sha256:../../x", "size": 1}]), INVALID, "not sha256"),
    "a digest nobody trusts": (v2(config=NOWHERE, layers=[{"digest": f"md5:{'1' * 32}", "size": 1}]), INVALID, "not sha256"),
    "a size below nothing": (v2(config=NOWHERE, layers=[{**NOWHERE, "size": -1}]), INVALID, "without a size"),
    "a size that nothing has": (v2(config=NOWHERE, layers=[{**NOWHERE, "size": 10**4000}]), INVALID, "an impossible size"),
    "a size of too many digits": (b'{"schemaVersion": 2, "layers": [' + b"9" * 5000 + b"]}", INVALID, "not JSON"),
    "a size that is true": (v2(config=NOWHERE, layers=[{**NOWHERE, "size": True}]), INVALID, "without a size"),
    "a config of a terabyte": (v2(config={**NOWHERE, "size": 1 << 40}, layers=[NOWHERE]), INVALID, "config of more than"),
    "a config that is not there": (v2(config=NOWHERE, layers=[NOWHERE]), NOT_FOUND, "does not have it"),
    "an index of nothing": (v2(manifests=[]), NOT_FOUND, "no variant for linux/"),
    "an index of what is not there": (
        v2(manifests=[{**NOWHERE, "platform": {"os": "linux", "architecture": "amd64"}}]), NOT_FOUND, "does not have it",
    ),
    "cut short": (b'{"schemaVersion": 2, "layers": [', INVALID, "not JSON"),
    "nested for ever": (deep(100_000), INVALID, "not JSON"),
    "a page that asks to log in": (b"<!DOCTYPE html><title>Log in</title>", INVALID, "not JSON"),
    "of 5 MiB": (b" " * (5 << 20), INVALID, "more than 4194304 bytes where few are expected"),
    "nothing": (b"", INVALID, "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_malicious_or_broken_manifest_is_refused(web: WebServer, refused: Callable[..., None], case: str) -> None:
    document, code, words = MANIFESTS[case]
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    web.serve("/v2/a/manifests/latest", body)
    refused(FakeRegistry(web).name("a"), words, code)


CONFIGS: dict[str, tuple[Any, str]] = {
    "fewer digests than layers": (CONFIG, "diff_ids do not match"),
    "a digest of something else": ({**CONFIG, "rootfs": {"diff_ids": [f"sha256:{'2' * 64}"]}}, "has the digest sha256:"),
    "another machine's": ({**CONFIG, "architecture": "s390x"}, "made for s390x"),
    "a list": ({**CONFIG, "rootfs": []}, "an artifact, not an image"),
    "a name and no value": ({**CONFIG, "config": {"Env": ["LD_PRELOAD"]}}, "Env has an entry that is not NAME=VALUE"),
    "a command with an end inside": ({**CONFIG, "config": {"Cmd": ["a\0b"]}}, "Cmd is malformed"),
    "a user of 5000 digits": ({**CONFIG, "config": {"User": "9" * 5000}}, "is not a user"),
    "a user beyond all": ({**CONFIG, "config": {"User": "4294967296"}}, "is not a user"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_malicious_or_broken_config_is_refused(web: WebServer, refused: Callable[..., None], case: str) -> None:
    config, words = CONFIGS[case]
    registry = FakeRegistry(web)
    if "config" in config:
        config = {**config, "rootfs": {"diff_ids": [digest(PLAIN)]}}
    described = registry.blob("a", json.dumps(config).encode())
    registry.document("a", "latest", v2(config=described, layers=[registry.blob("a", LAYER)]))
    refused(registry.name("a"), words)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def sound(web: WebServer) -> tuple[str, str]:
    """The name of a good image, and the path of its layer."""
    registry = FakeRegistry(web)
    registry.manifest("a", [(LAYER, PLAIN)])
    return registry.name("a"), f"/v2/a/blobs/{digest(LAYER)}"


Request = http.server.BaseHTTPRequestHandler


def cut(request: Request) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(LAYER)))
    request.end_headers()
    request.wfile.write(LAYER[:100])
    request.close_connection = True


def reset(request: Request) -> None:
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    request.close_connection = True
    request.connection.close()
    request.wfile = request.rfile  # nothing more is flushed


def gibberish(request: Request) -> None:
    request.wfile.write(b"\0\xff" * 100 + b"\r\n\r\n")
    request.close_connection = True


def headers_for_ever(request: Request) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000 + b"\r\n")
    request.close_connection = True


def says(status: int, body: bytes = b"", **headers: str) -> Callable[[Request], None]:
    def route(request: Request) -> None:
        request.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return route


# More digits than Python converts to a number.
NUMBER = "9" * 5000
LOGIN = 'Bearer realm="{}",service="s"'

ANSWERS: dict[str, tuple[Callable[[Request], None], grpc.StatusCode, str]] = {
    "nothing of the kind": (says(404), NOT_FOUND, "does not have it; check the name and the tag"),
    "a login, and does not say how": (says(401), DENIED, "wants a login.*image pull secret"),
    "a login at a place in the clear": (
        says(401, WWW_Authenticate=LOGIN.format("http://198.51.100.1/token")), DENIED, "a URL that is not https",
    ),
    "a login at a file": (says(401, WWW_Authenticate=LOGIN.format("file:///etc/shadow")), DENIED, "not https"),
    "that it is forbidden": (says(403), DENIED, "wants a login"),
    "that it is busy": (says(429), AWAY, r"^RegistryUnavailable: .* limits the rate of pulls \(HTTP 429\); try again later"),
    "that it is busy for an hour": (says(429, Retry_After="3600"), AWAY, "^RegistryUnavailable: .*try again in 3600 s"),
    "that it is busy until no day": (says(429, Retry_After="Mon, 01 Jan 99999999999 00:00:00 GMT"), AWAY, "; try again later"),
    "that it is busy for an eternity": (says(429, Retry_After=NUMBER), AWAY, "; try again in 999999999 s"),
    "that it failed": (says(500), AWAY, "^RegistryUnavailable: .* answers HTTP 500; try again later"),
    "a gateway's page": (says(502, b"<html>"), AWAY, "^RegistryUnavailable: .* answers HTTP 502"),
    "half of it": (cut, AWAY, "^RegistryUnavailable: .* broke off"),
    "nothing, and hangs up": (reset, AWAY, "^RegistryUnavailable: .* cannot be reached"),
    "no HTTP": (gibberish, AWAY, "^RegistryUnavailable: .* cannot be reached"),
    "headers for ever": (headers_for_ever, AWAY, "^RegistryUnavailable: .* cannot be reached"),
    "go to yourself": (says(302, Location="?again"), INVALID, "redirects more than"),
    "go to a file": (says(302, Location="file:///etc/shadow"), INVALID, r"not an http\(s\) URL"),
    "go to the cloud's secrets": (says(302, Location="http://169.254.169.254/"), INVALID, "images.forbidden_networks"),
    "a part that was not asked for": (says(206, LAYER, Content_Range=f"bytes 0-9/{len(LAYER)}"), AWAY, "answers HTTP 206"),
    "other bytes": (says(200, bytes(len(LAYER))), INVALID, "has the digest sha256:.*expected|cannot be read"),
    "fewer bytes": (says(200, LAYER[:-1]), INVALID, "bytes where its manifest says|cut short"),
    "more bytes": (says(200, LAYER + b"\0"), INVALID, "is longer than the"),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_a_bad_answer_of_a_registry_is_reported(web: WebServer, refused: Callable[..., None], case: str) -> None:
    """The registry is asked for the layer of a sound image."""
    route, code, words = ANSWERS[case]
    name, path = sound(web)
    web.routes[path] = route
    refused(name, words, code)


@pytest.mark.parametrize("words", [f"bytes {NUMBER}-{NUMBER}/{NUMBER}", f"bytes {NUMBER}-/*", "bytes 100-"])
def test_a_part_with_an_invalid_content_range_is_rejected(
    web: WebServer, refused: Callable[..., None], words: str
) -> None:
    """Half of a file, or of a layer, has arrived."""
    name, path = sound(web)
    for at in (path, "/a.img"):
        web.routes[at] = cut_unless_a_part(says(206, LAYER[100:], Content_Range=words, ETag='"1"'))
    refused(web.url("/a.img"), "has changed|does not send the rest", AWAY)
    if words != "bytes 100-":
        refused(name, "does not send the rest", AWAY)


def cut_unless_a_part(part: Callable[[Request], None]) -> Callable[[Request], None]:
    def route(request: Request) -> None:
        if "Range" in request.headers:
            part(request)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(LAYER)))
        request.send_header("ETag", '"1"')
        request.end_headers()
        request.wfile.write(LAYER[:100])
        request.close_connection = True

    return route


def test_a_manifest_that_does_not_match_its_digest_is_refused(web: WebServer, refused: Callable[..., None]) -> None:
    name, _ = sound(web)
    wanted = f"sha256:{'3' * 64}"
    web.routes[f"/v2/a/manifests/{wanted}"] = web.routes["/v2/a/manifests/latest"]
    refused(f"{name}@{wanted}", f"expected {wanted}; the registry is damaged")


def test_a_file_that_does_not_match_its_digest_is_refused(web: WebServer, refused: Callable[..., None]) -> None:
    refused(f"{web.serve('/a.img', bytes(1024))}@sha256:{'3' * 64}", "has changed or was tampered with")


FILES: dict[str, tuple[Callable[[Request], None], grpc.StatusCode, str]] = {
    "nothing of the kind": (says(404), NOT_FOUND, r"does not exist \(HTTP 404\)"),
    "that it is forbidden": (says(403), DENIED, r"is refused \(HTTP 403\)"),
    "that it is busy for an hour": (says(503, Retry_After="3600"), AWAY, "^RegistryUnavailable: .*; try again in 3600 s"),
    "that it failed": (says(500), AWAY, "^RegistryUnavailable: .* answers HTTP 500 where 200 is expected"),
    "half of it": (says(200, bytes(512), Content_Length="1024", Connection="close"), AWAY, "^RegistryUnavailable: .* broke off"),
    "it packed on the way": (says(200, LAYER, Content_Encoding="gzip"), INVALID, "is sent encoded"),
    "more than there may be": (says(200, b"", Content_Length=str(1 << 50), Connection="close"), INVALID, r"images\.max_bytes"),
    "more than can be counted": (
        says(200, b"", Content_Length=NUMBER, Connection="close"), AWAY, "^RegistryUnavailable: .* a length of 5000 digits",
    ),
    "go to yourself": (says(302, Location="?again"), INVALID, "redirects more than"),
    "go to the node's admin": (says(302, Location="unix:///run/virtshim/admin.sock"), INVALID, r"not an http\(s\) URL"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_bad_answer_of_a_web_server_is_reported(web: WebServer, refused: Callable[..., None], case: str) -> None:
    route, code, words = FILES[case]
    web.routes["/a.img"] = route
    refused(web.url("/a.img"), words, code)
