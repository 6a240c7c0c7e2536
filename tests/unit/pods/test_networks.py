"""virtshim's client of tapmanager returns values and errors in virtshim's own types."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tapmanager import server
from tapmanager.errors import TapmanagerError
from tapmanager.fields import Json
from tapmanager.peer import Peer
from tapmanager.protocol import KINDS
from tapmanager.server import Answer
from virtshim.model.errors import DeadlineExceeded, InternalError, Kind, Unavailable
from virtshim.model.ids import SandboxId
from virtshim.model.network import Dns, Interface, PodNetwork, PolicyRule, Route, TableRoute
from virtshim.model.sandbox import PodKey, PortMapping
from virtshim.model.usage import InterfaceUsage
from virtshim.pods.networks import PodNetworkClient
from virtshim.pods.ports import AttachRequest, PodNetworks
from virtshim.pods.tapmanager_connection import TapmanagerConnection

SANDBOX = SandboxId("ab" * 32)
REQUEST = AttachRequest(
    SANDBOX, PodKey("ns", "web", "uid", 3), Dns(("10.96.0.10",), ("a.b",)), (PortMapping("tcp", 80, 8080, ""),), "web-0"
)
NETWORK = {
    "netns": "/run/netns/x",
    "interfaces": [
        {
            "name": "eth0",
            "mac": "0a:58:00:00:00:01",
            "mtu": 1450,
            "addresses": ["10.88.0.5/16"],
            "routes": [
                {"destination": "10.0.0.0/8", "gateway": None},
                {"destination": "0.0.0.0/0", "gateway": "10.88.0.1"},
            ],
        }
    ],
    "ips": ["10.88.0.5"],
    "dns": {"servers": ["10.96.0.10"], "searches": [], "options": []},
    "fetch_key": "k",
}


class Wire:
    """A server whose verbs are `answer`; keeps what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "s")
        self.asked: list[Json] = []
        self.answer: Callable[[], Json] = dict
        self.server = server.Server(server.listen(self.path, os.getegid()), self._perform, os.geteuid())
        self.server.start()
        self.client = PodNetworkClient(TapmanagerConnection(self.path))

    def _perform(self, request: Json, peer: Peer, until: float) -> Answer:
        self.asked.append(request)
        return Answer(self.answer())


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path)
    yield made
    made.server.stop(5.0)


def raises(exc: Exception) -> Callable[[], Json]:
    def fail() -> Json:
        raise exc

    return fail


def test_the_client_implements_the_port() -> None:
    client: PodNetworks = PodNetworkClient(TapmanagerConnection("/x"))
    assert client is not None


def test_an_attached_network_comes_back_as_a_value(wire: Wire) -> None:
    wire.answer = lambda: NETWORK
    assert wire.client.attach(REQUEST, 5.0) == PodNetwork(
        "/run/netns/x",
        (
            Interface(
                "eth0",
                "0a:58:00:00:00:01",
                1450,
                ("10.88.0.5/16",),
                (Route("10.0.0.0/8"), Route("0.0.0.0/0", "10.88.0.1")),
            ),
        ),
        ("10.88.0.5",),
        Dns(("10.96.0.10",)),
        "k",
    )
    assert wire.asked[0]["args"] == {
        "sandbox": SANDBOX.value,
        "pod": {"namespace": "ns", "name": "web", "uid": "uid"},
        "dns": {"servers": ["10.96.0.10"], "searches": ["a.b"], "options": []},
        "port_mappings": [{"protocol": "tcp", "container_port": 80, "host_port": 8080, "host_ip": ""}],
        "hostname": "web-0",
        "policy_routes": True,
    }


def test_rules_and_tables_come_with_their_interface(wire: Wire) -> None:
    rules = [{"family": 4, "priority": 9, "table": 100, "source": "10.88.0.5/32", "target": ""}]
    routes = [
        {"table": 100, "destination": "0.0.0.0/0", "gateway": "10.88.0.1", "source": "", "metric": 0, "mtu": 1400}
    ]
    interface = {**NETWORK["interfaces"][0], "rules": rules, "table_routes": routes}
    wire.answer = lambda: {**NETWORK, "interfaces": [interface]}
    (nic,) = wire.client.attach(REQUEST, 5.0).interfaces
    assert nic.rules == (PolicyRule(4, 9, 100, "10.88.0.5/32"),)
    assert nic.table_routes == (TableRoute(100, "0.0.0.0/0", "10.88.0.1", mtu=1400),)
    wire.answer = lambda: {
        **NETWORK,
        "interfaces": [{**interface, "rules": [{**rules[0], "source": "10.88.0.5; reboot"}]}],
    }
    with pytest.raises(InternalError, match=r"answer\.interfaces\.rules\.source"):
        wire.client.attach(REQUEST, 5.0)


def test_release_and_list_use_sandbox_ids(wire: Wire) -> None:
    wire.client.release(SANDBOX, 5.0)
    assert wire.asked[0]["args"] == {"sandbox": SANDBOX.value}
    wire.answer = lambda: {"sandboxes": [SANDBOX.value]}
    assert wire.client.attached(5.0) == {SANDBOX}


def test_the_owner_of_a_network_is_given_without_the_attempt(wire: Wire) -> None:
    wire.answer = lambda: {"namespace": "ns", "name": "web", "uid": "uid"}
    assert wire.client.pod_of(SANDBOX, 5.0) == PodKey("ns", "web", "uid", 0)
    assert wire.asked[0]["args"] == {"sandbox": SANDBOX.value}


def test_a_missing_network_has_no_pod_and_an_unreadable_one_is_an_error(wire: Wire) -> None:
    wire.answer = raises(TapmanagerError("not-found", "sandbox has no network"))
    assert wire.client.pod_of(SANDBOX, 5.0) is None
    wire.answer = raises(TapmanagerError("internal", "the network record cannot be read"))
    with pytest.raises(InternalError, match="cannot be read"):
        wire.client.pod_of(SANDBOX, 5.0)


@pytest.mark.parametrize("kind", [Kind(name) for name in sorted(KINDS)])
def test_every_kind_of_error_becomes_the_products_error_of_that_kind(wire: Wire, kind: Kind) -> None:
    wire.answer = raises(TapmanagerError(kind.value, "the plugin's words"))
    with pytest.raises(Exception, match="the plugin's words") as caught:
        wire.client.attach(REQUEST, 5.0)
    assert getattr(caught.value, "kind", None) is kind


@pytest.mark.parametrize(
    "broken", [{}, {**NETWORK, "ips": 1}, {**NETWORK, "interfaces": [{}]}, {**NETWORK, "dns": None}]
)
def test_an_answer_that_cannot_be_used_is_an_internal_error(wire: Wire, broken: Json) -> None:
    wire.answer = lambda: broken
    with pytest.raises(InternalError, match="cannot be used"):
        wire.client.attach(REQUEST, 5.0)


def test_an_absent_tapmanager_is_unavailable_with_a_remedy(tmp_path: Path) -> None:
    client = PodNetworkClient(TapmanagerConnection(str(tmp_path / "none")))
    with pytest.raises(Unavailable, match="systemctl status tapmanager"):
        client.release(SANDBOX, 1.0)
    assert "systemctl status tapmanager" in client.trouble()


def test_no_time_left_is_deadline_exceeded(wire: Wire) -> None:
    with pytest.raises(DeadlineExceeded):
        wire.client.release(SANDBOX, 0.0)


def test_trouble_is_tapmanagers_own_reason_or_nothing(wire: Wire) -> None:
    wire.answer = lambda: {"ready": True, "reason": ""}
    assert wire.client.trouble() == ""
    wire.answer = lambda: {"ready": False, "reason": "no CNI config"}
    assert wire.client.trouble() == "no CNI config"


def test_counters_are_read_page_by_page_to_the_end(wire: Wire) -> None:
    first, second = "a" * 64, "b" * 64
    pages = [
        {"sandboxes": {first: {"eth0": [1, 2, 3, 4, 5, 6, 7, 8]}}, "last": first},
        {"sandboxes": {second: {"eth0": [0] * 8, "net1": [9] * 8}}, "last": ""},
    ]
    wire.answer = lambda: pages.pop(0)
    assert wire.client.counters(5.0) == {
        SandboxId(first): (InterfaceUsage("eth0", 1, 2, 3, 4, 5, 6, 7, 8),),
        SandboxId(second): (InterfaceUsage("eth0"), InterfaceUsage("net1", *[9] * 8)),
    }
    assert [request["args"] for request in wire.asked] == [{"after": ""}, {"after": first}]


def test_a_page_of_counters_that_points_backwards_is_the_last_one_read(wire: Wire) -> None:
    wire.answer = lambda: {"sandboxes": {}, "last": "a" * 64}
    assert wire.client.counters(5.0) == {}
    assert len(wire.asked) == 2


@pytest.mark.parametrize("interfaces", [[], {"eth0": [1] * 7}, {"eth0": ["1"] * 8}, {"eth0": {}}])
def test_malformed_counters_are_an_error(wire: Wire, interfaces: object) -> None:
    wire.answer = lambda: {"sandboxes": {SANDBOX.value: interfaces}, "last": ""}
    with pytest.raises(InternalError, match="reading the pods' network counters"):
        wire.client.counters(5.0)


def test_a_hanging_tapmanager_is_given_up_before_the_calls_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with server.listen(path, os.getegid()), pytest.raises(Unavailable, match="does not answer; restart it"):
        PodNetworkClient(TapmanagerConnection(path, patience=0.02, alive_within=0.02)).release(SANDBOX, 240.0)
