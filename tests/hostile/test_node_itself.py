"""A pod's author cannot name an image on the node itself, where daemons trust every client on loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.registry import FakeRegistry
from fakes.webserver import WebServer, serving

from virtshim.images.connect import ForbiddenNetworks
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.model.errors import InvalidRequest, NotFound, ShimError, Unavailable

pytestmark = pytest.mark.hostile

NEVER = threading.Event()
NO_DISK = b"a disk without a partition"
Make = Callable[..., ImageFileStore]


@pytest.fixture
def make_store(tmp_path: Path) -> Make:
    return lambda **settings: ImageFileStore(str(tmp_path / "images"), ImageSettings(**settings))


def refused(store: ImageFileStore, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"loopback.*images\.insecure_registries"):
        store.fetch(name, None, NEVER)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.9.10",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::127.0.0.1",
        "2002:7f00:1::1",
        "2001:db8::5efe:127.0.0.1",
    ],
)
def test_every_spelling_of_loopback_is_refused(address: str) -> None:
    assert ForbiddenNetworks().has(address, "node.example", 80)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "[::1]"]
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_web_server_on_the_node_is_not_contacted(web: WebServer, make_store: Make, scheme: str, host: str) -> None:
    port = web.address.rpartition(":")[2]
    web.serve("/x.qcow2", NO_DISK)
    refused(make_store(), f"{scheme}://{host}:{port}/x.qcow2")
    assert web.seen == []


def test_a_registry_on_the_node_is_not_contacted(web: WebServer, make_store: Make) -> None:
    name = FakeRegistry(web).push("vm", {"disk/a.img": NO_DISK})
    refused(make_store(), name)
    refused(make_store(), name.replace("127.0.0.1", "localhost"))
    assert web.seen == []


def test_a_host_name_for_loopback_is_not_contacted_even_if_a_server_is_listed(
    web: WebServer, make_store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator has listed a server, not every host name for loopback."""
    port = int(web.address.rpartition(":")[2])

    def there(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", there)
    refused(make_store(insecure_registries=("127.0.0.1", "localhost")), f"http://rebound.example:{port}/x.qcow2")
    assert web.seen == []


def test_a_redirect_to_the_node_is_refused(web: WebServer, make_store: Make) -> None:
    with serving() as other:
        other.serve("/secret", NO_DISK)
        name = web.answer("/x.qcow2", 302, Location=other.url("/secret"))
        refused(make_store(insecure_registries=(web.address,)), name)
        assert other.seen == []
    assert len(web.seen) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "[::1]"])
def test_an_http_proxy_is_not_asked_for_a_server_on_the_node(
    web: WebServer, make_store: Make, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """The proxy might be on the node, too."""
    monkeypatch.setenv("http_proxy", f"http://{web.address}")
    monkeypatch.delenv("no_proxy", raising=False)
    refused(make_store(), f"http://{host}:10250/pods.img")
    assert web.seen == []


def test_a_login_service_on_the_node_is_not_contacted(web: WebServer, make_store: Make) -> None:
    with serving() as other:
        web.answer("/v2/vm/manifests/latest", 401, WWW_Authenticate=f'Bearer realm="{other.url("/token")}",service="x"')
        with pytest.raises(ShimError):
            make_store(insecure_registries=(web.address,)).fetch(f"{web.address}/vm", None, NEVER)
        assert other.seen == []


@pytest.mark.parametrize("listed", ["{host}:{port}", "{host}"])
def test_a_listed_server_on_the_node_is_contacted(web: WebServer, make_store: Make, listed: str) -> None:
    host, port = web.address.split(":")
    store = make_store(insecure_registries=(listed.format(host=host, port=port),))
    with pytest.raises((NotFound, Unavailable)):
        store.fetch(web.url("/none.qcow2"), None, NEVER)
    assert len(web.seen) >= 1


def test_a_listed_port_does_not_allow_other_ports(web: WebServer, make_store: Make) -> None:
    refused(make_store(insecure_registries=("127.0.0.1:1", "localhost")), web.url("/x.qcow2"))
    assert web.seen == []


def test_a_forbidden_server_stays_forbidden_even_if_it_is_listed(web: WebServer, make_store: Make) -> None:
    store = make_store(insecure_registries=("127.0.0.1",), forbidden_networks=("127.0.0.0/8",))
    refused(store, web.url("/x.qcow2"))
    assert web.seen == []


def test_the_operators_mirror_on_the_node_is_used_but_cannot_redirect_to_the_node(
    web: WebServer, make_store: Make, tmp_path: Path
) -> None:
    hosts = tmp_path / "certs.d" / "registry.example"
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(f'server = "http://{web.address}"\n')
    with serving() as other:
        web.answer("/v2/vm/manifests/latest", 302, Location=other.url("/secret"))
        with pytest.raises(ShimError, match="loopback"):
            make_store(registry_hosts_dir=str(hosts.parent)).fetch("registry.example/vm", None, NEVER)
        assert other.seen == []
    assert len(web.seen) >= 1
