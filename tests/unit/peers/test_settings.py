"""The table [peers] of the settings configures the server for other nodes."""

from __future__ import annotations

import pytest
from fakes.node_certificates import ClusterCa

from virtshim.app.adapters import peer_files, peer_server
from virtshim.config.settings import Settings
from virtshim.model.text import host_and_port
from virtshim.peers.client import PeerClient
from virtshim.system.live import Live

pytestmark = pytest.mark.outlive


def test_a_node_with_certificate_and_address_serves_others_with_its_operations(ca: ClusterCa) -> None:
    theirs = ca.node("two")
    table = {"listen": "127.0.0.1:0", "certificate": theirs.certificate, "key": theirs.key, "ca": theirs.ca}
    settings = Settings.model_validate({"peers": table})
    assert peer_files(settings) == theirs
    server = peer_server(settings, {"greet": lambda link, asked: link.send({"hello": asked["name"]}, 30)})
    server.start()
    client = PeerClient(ca.node("one"), Live({"two": f"127.0.0.1:{server.port}"}))
    with client.connect("two", 30) as link:
        link.send({"do": "greet", "name": "one"}, 30)
        assert link.receive(30) == {"hello": "one"}
    server.close()


def test_a_node_without_these_settings_starts_and_stops_all_the_same() -> None:
    server = peer_server(Settings(), {})
    server.start()
    server.close()


@pytest.mark.parametrize(
    "address", ["", "a b", "10.0.0.1:", "10.0.0.1:0", "host:99999", "fd00::1", "http://a", "[x]:1"]
)
def test_a_bad_address_in_the_settings_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(ValueError, match=r"node7: .* is not an address: write a name or an IP address"):
        Settings.model_validate({"peers": {"addresses": {"node7": address}}})


def test_addresses_may_have_a_port() -> None:
    assert [host_and_port(one, 9) for one in ("a", "a.b:1", "10.0.0.1", "[fd00::7]", "[fd00::7]:2")] == [
        ("a", 9), ("a.b", 1), ("10.0.0.1", 9), ("fd00::7", 9), ("fd00::7", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"listen": "0.0.0.0:10017"}, "also set peers.certificate, peers.key, peers.ca"),
        ({"certificate": "/c", "ca": "/a"}, "also set peers.key"),
        ({"key": "k"}, "pattern"),
        ({"listen": "unix:/a"}, "must be an IP address and a port"),
        ({"addresses": {"Node": "a"}}, "'Node' is not the name of a node"),
    ],
)
def test_settings_that_cannot_work_are_refused(table: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings.model_validate({"peers": table})
