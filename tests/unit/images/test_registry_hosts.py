"""containerd's certs.d configures mirrors, certificates and headers of registries as containerd's documents
describe."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.registry import FakeRegistry
from fakes.webserver import WebServer, serving

from virtshim.images.filestore import ImageFileStore
from virtshim.images.pull_watch import PullWatch
from virtshim.images.registries.hosts_toml import RegistryHost, hosts_of
from virtshim.model.errors import InvalidRequest, NotFound, PermissionRefused, ShimError, Unavailable
from virtshim.model.image import Credentials

NEVER = threading.Event()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "certs.d"


@pytest.fixture
def write(directory: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "registry.test", file: str = "hosts.toml") -> Path:
        (directory / name).mkdir(parents=True, exist_ok=True)
        path = directory / name / file
        path.write_text(text)
        return path

    return write


def urls(registry: str, directory: Path) -> list[str]:
    return [host.url for host in hosts_of(registry, str(directory))]


def test_a_registry_without_configuration_is_asked_directly(write, directory: Path) -> None:
    assert hosts_of("registry.test", str(directory)) == hosts_of("registry.test", "") == (RegistryHost(),)
    write("server = 'https://a.test'", "other.test")
    assert hosts_of("registry.test", str(directory)) == (RegistryHost(),)


def test_the_most_specific_directory_counts(write, directory: Path) -> None:
    write("server = 'default.test'", "_default")
    assert urls("registry.test:5000", directory) == ["https://default.test/v2"]
    write("server = 'portless.test'", "registry.test")
    assert urls("registry.test:5000", directory) == ["https://default.test/v2"]
    write("server = 'colon.test'", "registry.test:5000")
    assert urls("registry.test:5000", directory) == ["https://colon.test/v2"]
    write("server = 'underscore.test'", "registry.test_5000_")
    assert urls("registry.test:5000", directory) == ["https://underscore.test/v2"]


@pytest.mark.parametrize("registry", ["..", ".", "a/../b", ""])
def test_a_registry_name_cannot_lead_out_of_the_directory(write, directory: Path, registry: str) -> None:
    (directory.parent / "hosts.toml").write_text("server = 'evil.test'")
    write("", "registry.test")
    assert hosts_of(registry, str(directory)) == (RegistryHost(),)


def test_hosts_are_asked_in_the_order_of_the_file_and_the_server_last(write, directory: Path) -> None:
    write("""
        server = "https://registry.test"
        capabilities = ["pull"]
        [host."https://z.test"]
        [host."http://a.test:5000"]
          capabilities = ["Pull", "resolve", "push"]
    """)
    assert urls("registry.test", directory) == [
        "https://z.test/v2", "http://a.test:5000/v2", "https://registry.test/v2",
    ]  # fmt: skip
    assert [set(host.may) for host in hosts_of("registry.test", str(directory))] == [
        {"pull", "resolve"},
        {"pull", "resolve"},
        {"pull"},
    ]


@pytest.mark.parametrize(
    ("host", "override", "url"),
    [
        ("https://a.test", False, "https://a.test/v2"),
        ("a.test:5000", False, "https://a.test:5000/v2"),
        ("https://a.test/", False, "https://a.test/v2"),
        ("https://a.test/v2/", False, "https://a.test/v2"),
        ("https://a.test/harbor", False, "https://a.test/harbor/v2"),
        ("https://a.test/v2/proxy", True, "https://a.test/v2/proxy"),
        ("https://a.test", True, "https://a.test"),
    ],
)
def test_the_api_path_is_the_same_as_containerds(write, directory: Path, host: str, override: bool, url: str) -> None:
    write(f'[host."{host}"]\noverride_path = {str(override).lower()}')
    assert urls("registry.test", directory) == [url, ""]


def test_all_settings_of_a_host_are_read(write, directory: Path) -> None:
    write("CA", file="ca.pem")
    other = write("OTHER", name="elsewhere", file="other.pem")
    write("BOTH", file="client.pem")
    write("KEY", file="client.key")
    write(f"""
        ca = "ca.pem"
        [host."https://a.test"]
          ca = ["ca.pem", "{other}"]
          client = [["client.pem", "client.key"]]
          skip_verify = true
          dial_timeout = "1m1.5s500ms"
          proxy = "http://proxy.test:3128/"
        [host."https://a.test".header]
          x-one = "1"
          x-two = ["2", "3"]
        [host."https://b.test"]
          client = "client.pem"
    """)
    a, b, server = hosts_of("registry.test", str(directory))
    assert a.transport.tls.cas == ("CA", "OTHER")
    assert a.transport.tls.client == ("BOTH", "KEY")
    assert (a.transport.tls.insecure, b.transport.tls.insecure) == (True, False)
    assert a.transport.connect_timeout == 62.0
    assert a.transport.proxy == "http://proxy.test:3128"
    assert a.headers == {"x-one": "1", "x-two": "2, 3"}
    assert b.transport.tls.client == ("BOTH", "BOTH")
    assert server.transport.tls.cas == ("CA",)
    assert all(host.transport.tls.beside_system for host in (a, b, server))


def test_without_hosts_toml_certificates_are_found_in_dockers_layout(write, directory: Path) -> None:
    for name in ("a.crt", "b.crt", "c.cert", "c.key"):
        write(name, file=name)
    (host,) = hosts_of("registry.test", str(directory))
    assert host.url == ""
    assert host.transport.tls.cas == ("a.crt", "b.crt")
    assert host.transport.tls.client == ("c.cert", "c.key")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("server = ", "is not TOML"),
        ("server = 1", "has server that is not text"),
        ("host = 1", "has host that is not a table"),
        ("ca = 1", "has ca that is not text"),
        ("ca = 'none.pem'", "names 'none.pem', which does not exist"),
        ("client = [['a', 'b', 'c']]", "more than one client certificate"),
        ("capabilities = 'pull'", "has capabilities that is not a list"),
        ("capabilities = ['fly']", "has a capability that is not pull, push, resolve"),
        ("skip_verify = 'yes'", "has skip_verify that is not true or false"),
        ("dial_timeout = 'soon'", "has a dial_timeout 'soon'; write it as 1s or 500ms"),
        ("proxy = 'socks5://p:1'", "has a proxy that is not http:// or https://"),
        ("server = 'ftp://a.test'", "names 'ftp://a.test'"),
        ("server = 'https://'", "which is not an http.s. URL of a host"),
        ("server = 'http://u:p@a.test'", "which is not an http.s. URL of a host"),
        ("server = 'http://a.test:99999'", "which is not an http.s. URL of a host"),
        ("[header]\nx = 1", "has header x that is not text"),
        ('[header]\nx = "a\\nb"', "has a header 'x' that cannot be sent"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(write, directory: Path, text: str, why: str) -> None:
    file = write(text)
    with pytest.raises(InvalidRequest, match=why) as caught:
        hosts_of("registry.test", str(directory))
    assert str(caught.value).startswith(f"{file} ")
    assert "correct it, or remove it" in str(caught.value)


@pytest.fixture
def mirror() -> Iterator[FakeRegistry]:
    with serving() as server:
        yield FakeRegistry(server)


@pytest.fixture
def pull(make_store: Callable[..., ImageFileStore], directory: Path) -> Callable[..., Any]:
    store = make_store(registry_hosts_dir=str(directory))

    def pull(name: str, credentials: Credentials | None = None) -> Any:
        return store.fetch(name, credentials, NEVER)

    return pull


def digest_of(disk: bytes) -> str:
    return hashlib.sha256(disk).hexdigest()


def test_a_mirror_serves_the_image_and_gets_the_registrys_name(
    web: WebServer, mirror: FakeRegistry, pull, write, qcow2: bytes
) -> None:
    mirror.push("vm/disk", {"disk/x": qcow2})
    write(
        f'[host."http://{mirror.web.address}"]\n[host."http://{mirror.web.address}".header]\nx-key = "7"', "images.test"
    )
    found = pull("images.test/vm/disk:latest")
    assert found.digest.hex == digest_of(qcow2)
    assert found.tag == "images.test/vm/disk:latest"
    assert all(path.endswith("?ns=images.test") for path in mirror.web.paths())
    assert {headers["x-key"] for _, headers in mirror.web.seen} == {"7"}
    assert len(mirror.web.seen) == 3


@pytest.mark.parametrize("status", [0, 401, 403, 404, 429, 500])
def test_the_registry_serves_what_a_mirror_does_not_have(
    fake_registry: FakeRegistry, mirror: FakeRegistry, pull, write, qcow2: bytes, status: int
) -> None:
    name = fake_registry.push("vm", {"disk/x": qcow2})
    address = mirror.web.address if status else "127.0.0.1:9"
    mirror.web.answer("/v2/vm/manifests/latest", status or 500)
    write(f'[host."http://{address}"]', fake_registry.web.address)
    assert pull(name).digest.hex == digest_of(qcow2)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that hosts were waited for, which takes no time here."""
    found: list[float] = []
    monkeypatch.setattr(PullWatch, "pause", lambda _, seconds: found.append(seconds))
    return found


@pytest.mark.parametrize("status", [429, 503])
def test_a_mirror_that_is_busy_is_not_waited_for_where_another_host_has_it(
    fake_registry: FakeRegistry, mirror: FakeRegistry, pull, write, qcow2: bytes, pauses: list[float], status: int
) -> None:
    name = fake_registry.push("vm", {"disk/x": qcow2})
    for path in fake_registry.web.routes:
        mirror.web.answer(path, status, Retry_After="20")
    write(f'[host."http://{mirror.web.address}"]', fake_registry.web.address)
    assert pull(name).digest.hex == digest_of(qcow2)
    assert len(mirror.web.seen) == len(fake_registry.web.seen) == 3
    assert pauses == []


@pytest.mark.parametrize("registry_status", [429, 500])
def test_a_busy_mirror_is_waited_for_when_the_registry_is_busy_or_broken(
    fake_registry: FakeRegistry, mirror: FakeRegistry, pull, write, qcow2: bytes, pauses, registry_status: int
) -> None:
    mirror.push("vm", {"disk/x": qcow2})
    manifest = "/v2/vm/manifests/latest"
    whole = mirror.web.routes[manifest]

    def once_busy(request: Any) -> None:
        mirror.web.answer(manifest, 429, Retry_After="7")
        mirror.web.routes[manifest](request)
        mirror.web.routes[manifest] = whole

    mirror.web.routes[manifest] = once_busy
    fake_registry.web.answer(manifest, registry_status, Retry_After="20")
    write(f'[host."http://{mirror.web.address}"]', fake_registry.web.address)
    assert pull(fake_registry.name("vm")).digest.hex == digest_of(qcow2)
    assert pauses == [7]


def test_a_busy_mirror_is_not_waited_for_when_the_registry_does_not_have_it(
    fake_registry: FakeRegistry, mirror: FakeRegistry, pull, write, pauses
) -> None:
    mirror.web.answer("/v2/vm/manifests/latest", 429, Retry_After="7")
    write(f'[host."http://{mirror.web.address}"]', fake_registry.web.address)
    with pytest.raises(NotFound):
        pull(fake_registry.name("vm"))
    assert pauses == []


def test_a_mirror_that_may_not_resolve_gives_blobs_only(
    fake_registry: FakeRegistry, mirror: FakeRegistry, pull, write, qcow2: bytes
) -> None:
    for registry in (fake_registry, mirror):
        registry.push("vm", {"disk/x": qcow2})
    write(f'[host."http://{mirror.web.address}"]\ncapabilities = ["pull"]', fake_registry.web.address)
    pull(fake_registry.name("vm"))
    assert fake_registry.web.paths() == ["/v2/vm/manifests/latest"]
    assert [path.partition("?")[0].split("/")[3] for path in mirror.web.paths()] == ["blobs", "blobs"]


def test_a_mirror_that_serves_a_manifest_with_the_wrong_digest_is_skipped(
    fake_registry: FakeRegistry, mirror: FakeRegistry, pull, write, qcow2: bytes
) -> None:
    name = fake_registry.push("vm", {"disk/x": qcow2})
    first = pull(name)
    mirror.web.serve(f"/v2/vm/manifests/{first.repo_digest.partition('@')[2]}", b"{}")
    write(f'[host."http://{mirror.web.address}"]', fake_registry.web.address)
    assert pull(first.repo_digest).digest == first.digest


def test_a_blob_interrupted_at_a_mirror_is_resumed_at_the_registry(
    fake_registry: FakeRegistry, mirror: FakeRegistry, pull, write, qcow2: bytes
) -> None:
    name = fake_registry.push("vm", {"disk/x": qcow2})
    mirror.push("vm", {"disk/x": qcow2})
    path = next(path for path in reversed(mirror.web.routes) if "/blobs/" in path)
    whole = fake_registry.web.routes[path]

    def cut(request: Any) -> None:
        mirror.web.answer(path, 500)
        request.send_response(200)
        request.send_header("Content-Length", "100")
        request.end_headers()
        request.close_connection = True

    mirror.web.routes[path] = cut
    write(f'[host."http://{mirror.web.address}"]', fake_registry.web.address)
    assert pull(name).digest.hex == digest_of(qcow2)
    assert whole is fake_registry.web.routes[path]
    assert fake_registry.web.paths() == [path]


def test_the_servers_error_is_reported_if_no_host_has_the_image(
    fake_registry: FakeRegistry, mirror: FakeRegistry, pull, write
) -> None:
    mirror.web.answer("/v2/vm/manifests/latest", 500)
    write(f'[host."http://{mirror.web.address}"]', fake_registry.web.address)
    with pytest.raises(NotFound, match="does not have it"):
        pull(fake_registry.name("vm"))


def test_a_registry_without_a_host_that_may_resolve_is_an_error(fake_registry: FakeRegistry, pull, write) -> None:
    write('capabilities = ["pull"]', fake_registry.web.address)
    with pytest.raises(InvalidRequest, match="has the capability resolve; give it to one"):
        pull(fake_registry.name("vm"))


@pytest.mark.parametrize(("server", "shown"), [("", True), ("images.test", False)])
def test_a_login_for_a_named_server_is_sent_to_that_server_only(
    mirror: FakeRegistry, pull, write, server: str, shown: bool
) -> None:
    mirror.web.answer("/v2/vm/manifests/latest", 401, WWW_Authenticate='Basic realm="x"')
    write(f'server = "http://{mirror.web.address}"', "images.test")
    with pytest.raises(PermissionRefused):
        pull("images.test/vm", Credentials("me", "secret", server_address=server))
    assert any("Authorization" in headers for _, headers in mirror.web.seen) is shown


def test_a_hosts_headers_are_not_sent_to_redirect_targets(
    web: WebServer, mirror: FakeRegistry, fake_registry: FakeRegistry, pull, write, qcow2: bytes
) -> None:
    name = fake_registry.push("vm", {"disk/x": qcow2})
    path = next(path for path in reversed(web.routes) if "/blobs/" in path)
    mirror.web.routes[path] = web.routes[path]
    web.answer(path, 302, Location=mirror.web.url(path))
    write('[header]\nx-key = "secret"', fake_registry.web.address)
    pull(name)
    assert all(headers["x-key"] == "secret" for _, headers in web.seen)
    ((_, headers),) = mirror.web.seen
    assert "x-key" not in headers


def test_a_mirror_in_a_forbidden_network_is_not_asked(mirror: FakeRegistry, make_store, directory, write) -> None:
    mirror.push("vm", {"disk/x": b""})
    write(f'server = "http://{mirror.web.address}"', "images.test")
    store = make_store(registry_hosts_dir=str(directory), forbidden_networks=("127.0.0.0/8",))
    with pytest.raises(ShimError, match="forbidden_networks"):
        store.fetch("images.test/vm", None, NEVER)
    assert mirror.web.seen == []


def test_an_unreachable_host_is_not_waited_for_longer_than_its_dial_timeout(pull, write) -> None:
    write('server = "https://192.0.2.1"\ndial_timeout = "1ms"', "images.test")
    with pytest.raises(Unavailable, match="cannot be reached"):
        pull("images.test/vm")
