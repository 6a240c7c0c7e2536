"""A pod's author cannot name an image at an address of the node's network that the author cannot reach."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from virtshim.images import connect
from virtshim.images.connect import ForbiddenNetworks
from virtshim.model.errors import InvalidRequest, Unavailable

pytestmark = pytest.mark.hostile

NEVER = threading.Event()
PRIVATE = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")

METADATA = [
    "169.254.169.254",
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "::169.254.169.254",
    "::ffff:0:169.254.169.254",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::169.254.169.254",
    "2002:a9fe:a9fe::1",
    "2001:0:a9fe:a9fe::1",
    "2001:db8::5efe:169.254.169.254",
    "2001:db8::200:5efe:169.254.169.254",
    "fe80::1",
    "fe80::1%lo",
    "fd00:ec2::254",
    "fd20:ce::254",
    "100.100.100.200",
    "192.0.0.192",
    "168.63.129.16",
    "0.0.0.0",
    "0.1.2.3",
    "::",
    "::ffff:0.0.0.0",
    "224.0.0.1",
    "ff02::1",
    "255.255.255.255",
]


@pytest.mark.parametrize("address", METADATA)
def test_link_local_and_metadata_addresses_are_forbidden_in_every_spelling(address: str) -> None:
    assert ForbiddenNetworks().has(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.7.7", "203.0.113.9", "2001:db8::9", "fd00::1"])
def test_other_addresses_are_allowed_unless_the_operator_forbids_them(address: str) -> None:
    assert not ForbiddenNetworks().has(address)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "fd12::1"]
)
def test_addresses_that_the_operator_lists_are_forbidden_in_every_spelling(address: str) -> None:
    assert ForbiddenNetworks(PRIVATE).has(address)
    assert ForbiddenNetworks(PRIVATE).has("169.254.169.254"), "and what always was"
    assert not ForbiddenNetworks(PRIVATE).has("203.0.113.9")


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "2852039166", "0xa9fea9fe", "169.254.43518"],
)
def test_an_image_in_a_forbidden_network_is_refused_before_any_request(store: Any, host: str) -> None:
    with pytest.raises(InvalidRequest, match=r"link-local.*images\.forbidden_networks"):
        store.fetch(f"http://{host}/latest/meta-data.img", None, NEVER)


def test_a_server_in_a_listed_network_is_refused_before_it_is_asked(web: Any, make_store: Any, qcow2: bytes) -> None:
    with pytest.raises(InvalidRequest, match="forbidden_networks"):
        make_store(forbidden_networks=PRIVATE).fetch(web.serve("/x.qcow2", qcow2), None, NEVER)
    assert web.seen == []


def test_a_registry_in_a_listed_network_is_refused_before_it_is_asked(fake_registry: Any, make_store: Any) -> None:
    name = fake_registry.push("vm", {"disk/a.img": b"a"})
    with pytest.raises(InvalidRequest, match="forbidden_networks"):
        make_store(forbidden_networks=PRIVATE).fetch(name, None, NEVER)
    assert fake_registry.web.seen == []


@pytest.mark.parametrize("host", ["169.254.169.254", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "2852039166"])
def test_a_redirect_into_a_forbidden_network_is_refused(web: Any, store: Any, host: str) -> None:
    with pytest.raises(InvalidRequest, match="link-local"):
        store.fetch(web.answer("/r.qcow2", 302, Location=f"http://{host}/latest"), None, NEVER)
    assert len(web.seen) == 1


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "[::ffff:169.254.169.254]",
        "[fd00:ec2::254]",
        "2852039166",
        "0xa9fea9fe",
        "10.1.2.3",
    ],
)
def test_a_proxy_is_not_asked_for_a_forbidden_address(web: Any, make_store: Any, monkeypatch: Any, host: str) -> None:
    """The proxy itself may be in a listed network: the operator chose it."""
    monkeypatch.setenv("http_proxy", f"http://{web.address}")
    with pytest.raises(InvalidRequest, match="link-local"):
        make_store(forbidden_networks=PRIVATE).fetch(f"http://{host}/x.qcow2", None, NEVER)
    assert web.seen == []


@pytest.mark.parametrize("host", ["169.254.169.254", "169.254.169.254.", "[::ffff:a9fe:a9fe]"])
def test_a_redirect_into_a_forbidden_network_through_a_proxy_is_refused(
    web: Any, store: Any, monkeypatch: Any, host: str
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{web.address}")
    web.answer("http://far.example/x.qcow2", 302, Location=f"http://{host}/latest")
    with pytest.raises(InvalidRequest, match="link-local"):
        store.fetch("http://far.example/x.qcow2", None, NEVER)
    assert len(web.seen) == 1


def test_a_percent_encoded_host_that_a_proxy_might_decode_is_refused(web: Any, store: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("http_proxy", f"http://{web.address}")
    web.answer("http://far.example/x.qcow2", 302, Location="http://169%2e254%2e169%2e254/latest")
    with pytest.raises((InvalidRequest, Unavailable)):
        store.fetch("http://far.example/x.qcow2", None, NEVER)
    assert len(web.seen) == 1


def test_only_allowed_addresses_of_a_host_are_used(web: Any, make_store: Any, qcow2: bytes, monkeypatch: Any) -> None:
    port = int(web.address.rpartition(":")[2])

    def both(host: str, *_: object, **__: object) -> list[Any]:
        tcp = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*tcp, ("10.0.0.1", port)), (*tcp, ("127.0.0.1", port))]

    monkeypatch.setattr(connect.socket, "getaddrinfo", both)
    store = make_store(forbidden_networks=("10.0.0.0/8",), insecure_registries=("both.example",))
    web.serve("/x.qcow2", qcow2)
    assert store.fetch(f"http://both.example:{port}/x.qcow2", None, NEVER).size == len(qcow2)
