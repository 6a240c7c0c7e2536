"""A pull from a web server stores what was published, and nothing half-made is left."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
import subprocess
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.journal import WAIT_LIMIT
from fakes.webserver import LOOPBACK

from virtshim.images import connect, http_client
from virtshim.images.connect import ForbiddenNetworks
from virtshim.images.filestore import ImageFileStore
from virtshim.images.http_client import HttpClient
from virtshim.images.pull_watch import PullWatch
from virtshim.images.translations import TlsProfile, Transport
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.model.image import Credentials, DiskFormat

NEVER = threading.Event()


def fetch(store: ImageFileStore, reference: str, credentials: Credentials | None = None) -> Any:
    return store.fetch(reference, credentials, NEVER)


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_a_pull_stores_the_file_by_its_digest(web, store, qcow2: bytes, incoming) -> None:
    url = web.serve("/a/disk.qcow2", qcow2)
    found = fetch(store, f"{url}:some-tag")
    assert str(found.digest) == digest_of(qcow2)
    assert found.tag == f"{url}:some-tag"
    assert found.repo_digest == f"{url}@{found.digest}"
    assert (found.size, found.virtual_size, found.format) == (len(qcow2), 16 << 20, DiskFormat.QCOW2)
    stored = Path(store.path(found.digest))
    assert stored.read_bytes() == qcow2
    assert stored.stat().st_mode & 0o777 == 0o644
    assert stored.parent.stat().st_mode & 0o777 == 0o711
    assert store.stored() == {found.digest}
    assert incoming() == []


def test_a_raw_disk_is_accepted_and_its_zeros_take_no_space(web, store) -> None:
    disk = b"\xeb\x3c" + bytes(510) + bytes(8 << 20)
    found = fetch(store, web.serve("/disk.raw", disk))
    assert (found.format, found.virtual_size, str(found.digest)) == (DiskFormat.RAW, len(disk), digest_of(disk))
    status = os.stat(store.path(found.digest))
    assert status.st_size == len(disk)
    assert status.st_blocks * 512 < 1 << 20


def test_a_pull_by_digest_has_no_tag_and_checks_the_file(web, store, qcow2: bytes, incoming) -> None:
    url = web.serve("/disk.qcow2", qcow2)
    assert fetch(store, f"{url}@{digest_of(qcow2)}").tag == ""
    with pytest.raises(InvalidRequest) as caught:
        fetch(store, f"{url}@{digest_of(b'other')}")
    assert digest_of(qcow2) in str(caught.value)
    assert digest_of(b"other") in str(caught.value)
    assert incoming() == []


def test_content_that_is_already_stored_is_not_rewritten(web, store, qcow2: bytes) -> None:
    url = web.serve("/disk.qcow2", qcow2)
    first = os.stat(store.path(fetch(store, url).digest))
    second = os.stat(store.path(fetch(store, web.serve("/again.qcow2", qcow2)).digest))
    assert (first.st_ino, first.st_mtime_ns) == (second.st_ino, second.st_mtime_ns)


def test_a_strong_etag_saves_the_download_but_not_the_request(web, store, qcow2: bytes) -> None:
    url = web.serve("/disk.qcow2", qcow2, ETag='"v1"')
    first = fetch(store, url)
    # The same tag on other bytes shows that they were not read.
    web.serve("/disk.qcow2", bytes(len(qcow2)), ETag='"v1"')
    assert fetch(store, url) == first
    assert len(web.seen) == 2
    with pytest.raises(InvalidRequest, match="expected sha256"):
        fetch(store, f"{url}@{digest_of(b'other')}")
    web.answer("/disk.qcow2", 403)
    with pytest.raises(PermissionRefused):
        fetch(store, url)
    store.delete(first.digest)
    web.serve("/disk.qcow2", qcow2, ETag='"v1"')
    assert fetch(store, url).digest == first.digest
    assert store.stored() == {first.digest}


def test_a_weak_etag_does_not_save_the_download(web, store, qcow2: bytes) -> None:
    url = web.serve("/disk.qcow2", qcow2, ETag='W/"v1"')
    fetch(store, url)
    web.serve("/disk.qcow2", bytes(1 << 20), ETag='W/"v1"')
    assert fetch(store, url).format is DiskFormat.RAW


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, NotFound),
        (410, NotFound),
        (401, PermissionRefused),
        (403, PermissionRefused),
        (429, Unavailable),
        (500, Unavailable),
        (503, Unavailable),
        (206, Unavailable),
        (204, Unavailable),
    ],
)
def test_each_refusal_has_its_kind(web, store, status: int, error: type[ShimError], incoming) -> None:
    url = web.answer("/disk.qcow2", status)
    with pytest.raises(error, match=f"HTTP {status}"):
        fetch(store, url)
    assert incoming() == []
    assert store.stored() == frozenset()


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_after_its_retry_after(web, store, qcow2: bytes, status: int) -> None:
    url, busy = web.serve("/disk.qcow2", qcow2), ["0", "0"]
    whole = web.routes["/disk.qcow2"]

    def route(request: Any) -> None:
        if not busy:
            whole(request)
            return
        request.send_response(status)
        request.send_header("Retry-After", busy.pop())
        request.send_header("Content-Length", "0")
        request.end_headers()

    web.routes["/disk.qcow2"] = route
    assert fetch(store, url).digest.hex == hashlib.sha256(qcow2).hexdigest()
    assert len(web.seen) == 3


def test_a_server_that_is_busy_for_long_is_left_to_kubelet(web, store) -> None:
    with pytest.raises(Unavailable, match="HTTP 429 where 200 is expected; try again in 3600 s"):
        fetch(store, web.answer("/disk.qcow2", 429, Retry_After="3600"))
    assert len(web.seen) == 1


def test_an_unreachable_server_is_unavailable_without_its_query(store) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port} cannot be reached .Connection refused") as caught:
        fetch(store, f"http://127.0.0.1:{port}/x.qcow2?signature=topsecret")
    assert "topsecret" not in str(caught.value)


def test_a_host_that_does_not_exist_is_unavailable(store) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        fetch(store, "http://no-such-host.invalid/x.qcow2")


def test_a_cut_download_is_unavailable_and_leaves_nothing(web, store, qcow2: bytes, incoming) -> None:
    def cut(request: Any) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(qcow2)))
        request.end_headers()
        request.wfile.write(qcow2[: len(qcow2) // 2])
        request.close_connection = True

    web.routes["/disk.qcow2"] = cut
    with pytest.raises(Unavailable, match="broke off"):
        fetch(store, web.url("/disk.qcow2"))
    assert incoming() == []


def test_a_cut_chunked_download_is_unavailable(web, store, qcow2: bytes) -> None:
    def cut(request: Any) -> None:
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"10000\r\n" + qcow2[:0x8000])
        request.close_connection = True

    web.routes["/disk.qcow2"] = cut
    with pytest.raises(Unavailable, match="broke off"):
        fetch(store, web.url("/disk.qcow2"))


def test_a_chunked_download_is_accepted(web, store, qcow2: bytes) -> None:
    def chunked(request: Any) -> None:
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for at in range(0, len(qcow2), 5000):
            piece = qcow2[at : at + 5000]
            request.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        request.wfile.write(b"0\r\n\r\n")

    web.routes["/disk.qcow2"] = chunked
    assert str(fetch(store, web.url("/disk.qcow2")).digest) == digest_of(qcow2)


def test_an_encoded_answer_is_refused(web, store, qcow2: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"sent encoded \(gzip"):
        fetch(store, web.serve("/disk.qcow2", qcow2, Content_Encoding="gzip"))


@pytest.mark.parametrize("announced", [True, False])
def test_a_disk_beyond_the_limit_is_refused(web, make_store, qcow2: bytes, announced: bool, incoming) -> None:
    store = make_store(max_bytes=len(qcow2) - 1)
    url = web.serve("/disk.qcow2", qcow2)
    if not announced:

        def endless(request: Any) -> None:
            request.send_response(200)
            request.send_header("Connection", "close")
            request.end_headers()
            request.close_connection = True
            while not web.over.is_set():
                request.wfile.write(qcow2)

        web.routes["/disk.qcow2"] = endless
    with pytest.raises(InvalidRequest, match=r"images\.max_bytes"):
        fetch(store, url)
    assert incoming() == []


def stall(web: Any, sent: bytes = b"") -> str:
    """Announces more than it sends, then says nothing."""

    def route(request: Any) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000000")
        request.end_headers()
        request.wfile.write(sent)
        web.over.wait(60)
        request.close_connection = True

    web.routes["/stall.qcow2"] = route
    return web.url("/stall.qcow2")


def test_a_stalled_source_is_given_up(web, make_store, incoming) -> None:
    store = make_store(progress_timeout=0.3)
    before = time.monotonic()
    with pytest.raises(Unavailable, match=r"sent nothing for 0\.3 s"):
        fetch(store, stall(web, b"QFI\xfb"))
    assert time.monotonic() - before < WAIT_LIMIT
    assert incoming() == []


def test_a_source_that_never_answers_is_given_up(web, make_store) -> None:
    web.routes["/mute.qcow2"] = lambda request: web.over.wait(60)
    with pytest.raises(Unavailable):
        fetch(make_store(progress_timeout=0.3), web.url("/mute.qcow2"))


@pytest.mark.parametrize("where", ["body", "headers"])
def test_a_cancelled_pull_ends_while_its_source_is_silent(web, store, where: str, incoming) -> None:
    cancelled, reached = threading.Event(), threading.Event()

    def mute(request: Any) -> None:
        reached.set()
        web.over.wait(60)

    url = stall(web, b"QFI\xfb")
    body = web.routes["/stall.qcow2"]
    web.routes["/stall.qcow2"] = lambda request: (reached.set(), body(request)) if where == "body" else mute(request)
    ended: list[BaseException] = []

    def pull() -> None:
        try:
            store.fetch(url, None, cancelled)
        except ShimError as error:
            ended.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    assert reached.wait(WAIT_LIMIT)
    cancelled.set()
    thread.join(WAIT_LIMIT)  # the source is silent for longer
    assert [type(error) for error in ended] == [DeadlineExceeded]
    assert incoming() == []


def test_connecting_can_be_cancelled(store) -> None:
    """A full backlog: the kernel drops what more comes, as a host behind a silent firewall does."""
    cancelled = threading.Event()
    with socket.socket() as silent, socket.socket() as one, socket.socket() as two:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for filler in (one, two):
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        timer = threading.Timer(0.3, cancelled.set)
        timer.start()
        before = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            store.fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/x.qcow2", None, cancelled)
        assert time.monotonic() - before < WAIT_LIMIT
        timer.join()


def test_redirects_are_followed_up_to_the_limit(web, store, qcow2: bytes) -> None:
    web.serve("/r0.qcow2", qcow2)
    for hop in range(1, 11):
        web.answer(f"/r{hop}.qcow2", 302, Location=f"/r{hop - 1}.qcow2")
    assert fetch(store, web.url("/r9.qcow2")).size == len(qcow2)
    with pytest.raises(InvalidRequest, match="more than 9 times"):
        fetch(store, web.url("/r10.qcow2"))


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://h/x", "http://h:99999/", "javascript:1"])
def test_a_redirect_to_another_scheme_is_refused(web, store, location: str) -> None:
    with pytest.raises(InvalidRequest, match="redirects to something"):
        fetch(store, web.answer("/r.qcow2", 301, Location=location))


def test_a_password_goes_to_the_named_host_only_and_only_when_asked(web, store, qcow2: bytes) -> None:
    def guarded(request: Any) -> None:
        if "Authorization" not in request.headers:
            web_answer_401(request)
            return
        request.send_response(302)
        request.send_header("Location", f"http://localhost:{web.server_address[1]}/elsewhere.qcow2")
        request.send_header("Content-Length", "0")
        request.end_headers()

    def web_answer_401(request: Any) -> None:
        request.send_response(401)
        request.send_header("WWW-Authenticate", 'Basic realm="x"')
        request.send_header("Content-Length", "0")
        request.end_headers()

    web.routes["/guarded.qcow2"] = guarded
    web.serve("/elsewhere.qcow2", qcow2)
    assert fetch(store, web.url("/guarded.qcow2"), Credentials("me", "hunter2")).size == len(qcow2)
    sent = [(path, headers.get("Authorization")) for path, headers in web.seen]
    login = "Basic " + base64.b64encode(b"me:hunter2").decode()
    assert sent == [("/guarded.qcow2", None), ("/guarded.qcow2", login), ("/elsewhere.qcow2", None)]
    with pytest.raises(PermissionRefused):
        fetch(store, web.url("/guarded.qcow2"))
    with pytest.raises(PermissionRefused):
        fetch(store, web.url("/guarded.qcow2"), Credentials("me", "hunter2", server_address="https://other.example/"))


def test_a_rule_sends_a_name_to_its_url_with_its_transport(web, make_store, qcow2: bytes, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    store = make_store(translations_dir=str(rules))
    web.serve("/real.qcow2", qcow2)
    web.answer("/moved.qcow2", 302, Location="/real.qcow2")
    rule = f"translations: [{{name: cirros, url: '{web.url('/moved.qcow2')}'}}]\n"
    (rules / "one.yaml").write_text(rule)
    assert fetch(store, "virtlet.cloud/cirros").tag == "virtlet.cloud/cirros:latest"
    (rules / "one.yaml").write_text(rule + "transports: {'': {maxRedirects: 0}}")
    with pytest.raises(InvalidRequest, match="redirects more than 0 times"):
        fetch(store, "cirros")
    stall(web)
    (rules / "one.yaml").write_text(
        f"translations: [{{name: cirros, url: '{web.url('/stall.qcow2')}'}}]\ntransports: {{'': {{timeout: 300}}}}"
    )
    with pytest.raises(DeadlineExceeded, match="timeout"):
        fetch(store, "cirros")
    (rules / "one.yaml").write_text("[")
    with pytest.raises(InvalidRequest, match=r"one\.yaml"):
        fetch(store, "cirros")


def test_a_link_local_address_is_refused(store) -> None:
    with pytest.raises(InvalidRequest, match="link-local"):
        fetch(store, "http://169.254.169.254/latest/meta-data.img")


def test_a_proxy_of_the_environment_is_used_but_not_for_loopback(web, store, qcow2: bytes, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://user:hunter2@{web.address}")
    web.serve("http://far.example/x.qcow2", qcow2)
    assert fetch(store, "http://far.example/x.qcow2").size == len(qcow2)
    assert web.seen[0][1]["proxy-authorization"].startswith("Basic ")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert fetch(store, web.serve("/x.qcow2", qcow2)).size == len(qcow2)


# ---- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Self-signed, for the name images.test only."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-subj", "/CN=images.test", "-addext", "subjectAltName=DNS:images.test", "-days", "2"]
    subprocess.run([*argv, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def secure_web(web, certificate: tuple[Path, Path]):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    context.load_verify_locations(certificate[0])
    context.verify_mode = ssl.CERT_OPTIONAL
    web.socket = context.wrap_socket(web.socket, server_side=True, do_handshake_on_connect=False)
    return web


def get(url: str, transport: Transport) -> bytes:
    with (
        PullWatch("x", NEVER, 5) as watch,
        HttpClient(watch, transport, ForbiddenNetworks(here=LOOPBACK)) as client,
        client.get(url, {}) as answer,
    ):
        return answer.all(1 << 20)


def test_tls_is_verified_against_the_profile(secure_web, certificate: tuple[Path, Path]) -> None:
    secure_web.serve("/x", b"hello")
    url = f"https://{secure_web.address}/x"
    ca = certificate[0].read_text()
    with pytest.raises(Unavailable, match=r"TLS failed \(self.signed certificate"):
        get(url, Transport())
    with pytest.raises(Unavailable, match="TLS failed"):
        get(url, Transport(tls=TlsProfile(cas=(ca,))))
    assert get(url, Transport(tls=TlsProfile(cas=(ca,), server_name="images.test"))) == b"hello"
    assert get(url, Transport(tls=TlsProfile(insecure=True))) == b"hello"


def test_a_server_without_tls_is_named_as_such(web) -> None:
    web.serve("/x", b"hello")
    with pytest.raises(Unavailable, match=r"speaks plain HTTP; .* write http://"):
        get(f"https://{web.address}/x", Transport())


def test_a_client_certificate_is_sent(secure_web, certificate: tuple[Path, Path]) -> None:
    redacted_url: list[Any] = []

    def route(request: Any) -> None:
        redacted_url.append(request.connection.getpeercert())
        request.send_response(200)
        request.send_header("Content-Length", "0")
        request.end_headers()

    secure_web.routes["/x"] = route
    cert, key = (path.read_text() for path in certificate)
    get(f"https://{secure_web.address}/x", Transport(tls=TlsProfile(client=(cert, key), insecure=True)))
    assert redacted_url[0]["subject"] == ((("commonName", "images.test"),),)
    with pytest.raises(InvalidRequest, match="not usable PEM"):
        get(f"https://{secure_web.address}/x", Transport(tls=TlsProfile(client=(cert, "no key"), insecure=True)))


def test_a_redirect_from_https_to_http_is_refused(secure_web) -> None:
    secure_web.answer("/down", 302, Location="http://images.example/x?signature=topsecret")
    with pytest.raises(InvalidRequest, match="from https to http") as caught:
        get(f"https://{secure_web.address}/down", Transport(tls=TlsProfile(insecure=True)))
    assert "topsecret" not in str(caught.value)


def test_a_stalled_tls_download_can_be_cancelled(secure_web) -> None:
    cancelled = threading.Event()
    url = stall(secure_web, b"x").replace("http://", "https://")
    timer = threading.Timer(0.3, cancelled.set)
    with (
        PullWatch("x", cancelled, 60) as watch,
        HttpClient(watch, Transport(tls=TlsProfile(insecure=True)), ForbiddenNetworks(here=LOOPBACK)) as client,
        client.get(url, {}) as answer,
    ):
        timer.start()
        before = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            answer.all(1 << 20)
        assert time.monotonic() - before < WAIT_LIMIT
    timer.join()


def test_urls_are_shown_without_secrets() -> None:
    assert http_client.redacted_url("https://u:p@h:1/a/b?sig=x#y") == "https://h:1/a/b"


def test_no_thread_outlives_a_pull(web, store, qcow2: bytes) -> None:
    fetch(store, web.serve("/x.qcow2", qcow2))
    assert not [thread for thread in threading.enumerate() if thread.name == "image-pull-watch"]


def test_concurrent_pulls_of_one_image_agree(web, store, qcow2: bytes, incoming: Callable[[], list[str]]) -> None:
    url = web.serve("/x.qcow2", qcow2)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(store, url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert incoming() == []


def test_a_look_up_without_a_free_thread_may_be_repeated(web, store, qcow2: bytes, monkeypatch: Any) -> None:
    class NoThread:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    url = web.serve("/disk.qcow2", qcow2)
    with monkeypatch.context() as patched:
        patched.setattr(connect, "threading", types.SimpleNamespace(Thread=NoThread))
        with pytest.raises(Unavailable, match="no thread can be started"):
            fetch(store, url)
    assert str(fetch(store, url).digest) == digest_of(qcow2)
