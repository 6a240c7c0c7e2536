"""The fake, and the client of a real tapmanager with a real CNI bridge network, fulfil the contract of PodNetworks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from fakes.networks import FakePodNetworks
from others_namespace import others_namespace
from tap_node import TapNode, for_a_test, private_node

from virtshim.model.errors import InternalError, Unavailable
from virtshim.model.ids import SandboxId
from virtshim.model.network import Dns
from virtshim.model.sandbox import Adoption, PodKey
from virtshim.pods.networks import PodNetworkClient
from virtshim.pods.ports import AttachRequest
from virtshim.pods.tapmanager_connection import TapmanagerConnection
from virtshim.store.ports import KnownNetworks

A = SandboxId("a" * 64)
B = SandboxId("b" * 64)
DNS = Dns(("10.96.0.10",), ("default.svc.cluster.local",), ("ndots:5",))
SECONDS = 60.0


def request(sandbox: SandboxId = A) -> AttachRequest:
    return AttachRequest(sandbox, PodKey("default", f"pod-{sandbox.value[0]}", "uid-1", attempt=3), DNS)


class World:
    networks: KnownNetworks

    def let_plugins_fail(self, words: str) -> None:
        """Makes plugins fail at ADD only."""
        raise NotImplementedError

    def lose_configuration(self) -> None:
        raise NotImplementedError

    def mend(self) -> None:
        """Makes plugins work and restores the configuration."""
        raise NotImplementedError

    def remove_namespace(self, sandbox: SandboxId) -> None:
        raise NotImplementedError

    def end_tapmanager(self) -> None:
        raise NotImplementedError


class InMemory(World):
    def __init__(self) -> None:
        self.networks = self._fake = FakePodNetworks()

    def let_plugins_fail(self, words: str) -> None:
        self._fake.plugin_error = words

    def lose_configuration(self) -> None:
        self._fake.why_not = "no CNI configuration"

    def mend(self) -> None:
        self._fake.plugin_error = self._fake.why_not = ""

    def remove_namespace(self, sandbox: SandboxId) -> None:
        self._fake.broken[sandbox] = "the namespace is gone"

    def end_tapmanager(self) -> None:
        self._fake.gone = True


@pytest.fixture
def in_memory() -> World:
    return InMemory()


class OnThisMachine(World):
    def __init__(self, node: TapNode) -> None:
        self._node = node
        self.networks = PodNetworkClient(TapmanagerConnection(node.socket))

    def let_plugins_fail(self, words: str) -> None:
        self._node.plugin("sour", f'echo \'{{"code": 100, "msg": "{words}"}}\'; test $CNI_COMMAND = DEL\n')
        self._node.configure(self._node.bridge_plugin(), {"type": "sour"})

    def lose_configuration(self) -> None:
        for path in self._node.conf_dir.iterdir():
            path.unlink()

    def mend(self) -> None:
        self._node.configure()

    def remove_namespace(self, sandbox: SandboxId) -> None:
        subprocess.run(["ip", "netns", "del", self._node.netns_of(sandbox.value).name], check=True)

    def end_tapmanager(self) -> None:
        self._node.stop()


@pytest.fixture(scope="module", autouse=True)
def running_node() -> Iterator[TapNode | None]:
    """The node exists before the leak check takes its snapshot."""
    if os.geteuid() != 0:
        yield None
        return
    with private_node() as node:
        node.start()
        yield node


@pytest.fixture
def on_this_machine(running_node: TapNode) -> Iterator[World]:
    with for_a_test(running_node) as node:
        world = OnThisMachine(node)
        yield world
        if node.runs():
            for sandbox in world.networks.attached(SECONDS):
                world.networks.release(sandbox, SECONDS)


@pytest.fixture(params=["in_memory", pytest.param("on_this_machine", marks=pytest.mark.network)])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.getfixturevalue(request.param)
    return made


def test_an_attached_pod_has_addresses_routes_and_a_link(world: World) -> None:
    network = world.networks.attach(request(), SECONDS)
    (nic,) = network.interfaces
    assert nic.name == "eth0"
    assert nic.mtu > 0
    assert len(bytes.fromhex(nic.mac.replace(":", ""))) == 6
    assert network.ips[0] in {address.split("/")[0] for address in nic.addresses}
    assert any(route.gateway for route in nic.routes)
    assert network.dns == DNS
    assert network.netns.startswith("/")
    assert world.networks.attached(SECONDS) == {A}


def test_attaching_again_gives_the_same_network(world: World) -> None:
    assert world.networks.attach(request(), SECONDS) == world.networks.attach(request(), SECONDS)


def test_pods_share_no_address_mac_key_or_namespace(world: World) -> None:
    first, second = (world.networks.attach(request(sandbox), SECONDS) for sandbox in (A, B))
    assert set(first.ips).isdisjoint(second.ips)
    assert first.fetch_key != second.fetch_key
    assert first.netns != second.netns
    assert first.interfaces[0].mac != second.interfaces[0].mac


def test_a_pod_is_attached_to_a_namespace_that_another_runtime_made(world: World) -> None:
    with others_namespace("10.90.7.5/24", "fd00:90::5/64") as others:
        ask = dataclasses.replace(request(), existing=Adoption(others.path, ("10.90.7.5", "fd00:90::5")))
        network = world.networks.attach(ask, SECONDS)
        (nic,) = network.interfaces
        assert (network.netns, network.ips, network.dns) == (others.path, ("10.90.7.5", "fd00:90::5"), DNS)
        assert (nic.name, nic.mtu, network.inode > 0) == ("eth0", 65520, True)
        assert world.networks.attach(ask, SECONDS) == network
        assert world.networks.lost(SECONDS) == {}
        world.networks.release(A, SECONDS)
        assert world.networks.attached(SECONDS) == frozenset()


def test_a_pod_may_be_released_twice(world: World) -> None:
    for sandbox in (A, B):
        world.networks.attach(request(sandbox), SECONDS)
    for _ in range(2):
        world.networks.release(A, SECONDS)
        assert world.networks.attached(SECONDS) == {B}


def test_an_unknown_pod_may_be_released(world: World) -> None:
    world.networks.release(A, SECONDS)
    assert world.networks.attached(SECONDS) == frozenset()


def test_a_network_knows_its_pod_but_not_the_attempt(world: World) -> None:
    assert world.networks.pod_of(A, SECONDS) is None
    world.networks.attach(request(), SECONDS)
    assert world.networks.pod_of(A, SECONDS) == PodKey("default", "pod-a", "uid-1", 0)
    world.networks.release(A, SECONDS)
    assert world.networks.pod_of(A, SECONDS) is None


def test_traffic_is_counted_while_links_are_attached(world: World) -> None:
    assert world.networks.counters(SECONDS) == {}
    for sandbox in (A, B):
        world.networks.attach(request(sandbox), SECONDS)
    world.networks.release(B, SECONDS)
    (usages,) = world.networks.counters(SECONDS).values()
    assert [usage.name for usage in usages] == ["eth0"]


def test_a_damaged_network_is_reported_until_it_is_released(world: World) -> None:
    for sandbox in (A, B):
        world.networks.attach(request(sandbox), SECONDS)
    assert world.networks.lost(SECONDS) == {}
    world.remove_namespace(A)
    lost = world.networks.lost(SECONDS)
    assert set(lost) == {A}
    assert lost[A]
    world.networks.release(A, SECONDS)
    assert world.networks.lost(SECONDS) == {}


def test_a_plugins_error_is_reported_and_the_next_attach_may_work(world: World) -> None:
    world.let_plugins_fail("no lemons left")
    with pytest.raises(InternalError, match="no lemons left"):
        world.networks.attach(request(), SECONDS)
    world.networks.release(A, SECONDS)
    assert world.networks.attached(SECONDS) == frozenset()
    world.mend()
    world.networks.attach(request(), SECONDS)
    assert world.networks.attached(SECONDS) == {A}


def failed_adds(world: World) -> int:
    return sum(run.failures for run in world.networks.plugin_runs(SECONDS) if run.command == "ADD")


def test_plugin_calls_are_counted_including_failed_ones(world: World) -> None:
    world.networks.attach(request(), SECONDS)
    world.networks.release(A, SECONDS)
    before = failed_adds(world)
    world.let_plugins_fail("no lemons left")
    with pytest.raises(InternalError):
        world.networks.attach(request(B), SECONDS)
    found = world.networks.plugin_runs(SECONDS)
    totals = {command: [run.buckets[-1] for run in found if run.command == command] for command in ("ADD", "DEL")}
    assert all(bound == float("inf") and count > 0 for runs in totals.values() for bound, count in runs)
    assert totals["ADD"]
    assert totals["DEL"]
    assert failed_adds(world) == before + 1
    assert all(run.seconds >= 0 for run in found)
    world.networks.release(B, SECONDS)


def test_without_a_configuration_no_network_can_be_created(world: World) -> None:
    assert world.networks.trouble() == ""
    world.lose_configuration()
    assert "CNI" in world.networks.trouble()
    with pytest.raises(Unavailable):
        world.networks.attach(request(), SECONDS)
    world.mend()
    assert world.networks.trouble() == ""


ASKED: dict[str, Callable[[KnownNetworks], object]] = {
    "attach": lambda networks: networks.attach(request(), SECONDS),
    "release": lambda networks: networks.release(A, SECONDS),
    "attached": lambda networks: networks.attached(SECONDS),
    "pod_of": lambda networks: networks.pod_of(A, SECONDS),
    "counters": lambda networks: networks.counters(SECONDS),
    "lost": lambda networks: networks.lost(SECONDS),
}


def test_without_tapmanager_calls_fail_and_the_trouble_is_reported(world: World) -> None:
    world.end_tapmanager()
    answered = []
    for name, ask in ASKED.items():
        try:
            ask(world.networks)
        except Unavailable:
            continue
        answered.append(name)
    assert answered == []
    assert world.networks.trouble()
