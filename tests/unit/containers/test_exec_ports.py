"""A port for commands is plugged into the container's VM, with a socket beside the other sockets."""

from __future__ import annotations

import uuid

import pytest
from fakes.world import World

from virtshim.containers.exec import AgentPort, PlugExecPort
from virtshim.model.errors import NotFound, ShimError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout

LAYOUT = Layout("/state", "/run/v")


class Plugs:
    def __init__(self) -> None:
        self.seen: list[tuple[uuid.UUID, ContainerId, int, str]] = []
        self.listens = False
        self.error: ShimError | None = None

    def plug_in(self, domain: uuid.UUID, container: ContainerId, number: int, socket: str) -> None:
        self.seen.append((domain, container, number, socket))

    def agent_listens(self, domain: uuid.UUID, container: ContainerId) -> bool:
        if self.error is not None:
            raise self.error
        return self.listens


def test_a_port_is_plugged_into_the_containers_vm_with_a_socket_beside_the_others(world: World):
    _, container = world.running()
    plugs = Plugs()
    PlugExecPort(world.records, plugs, LAYOUT).plug(container, 14)
    socket = f"/run/v/vm/{container.short}/exec-14.sock"
    assert plugs.seen == [(world.domain(container), container, 14, socket)]


def test_a_container_that_is_gone_gets_no_port(world: World):
    plugs = Plugs()
    with pytest.raises(NotFound):
        PlugExecPort(world.records, plugs, LAYOUT).plug(ContainerId("a" * 64), 0)
    assert not plugs.seen


def test_an_agents_port_counts_as_open_unless_it_is_known_to_be_closed(world: World):
    _, container = world.running()
    plugs = Plugs()
    port = AgentPort(world.records, plugs)
    assert not port.is_open(container)
    plugs.listens = True
    assert port.is_open(container)
    plugs.error = Unavailable("libvirt is gone")
    assert port.is_open(container)
    assert port.is_open(ContainerId("a" * 64))
