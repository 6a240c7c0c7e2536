from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.guest import HostGuest

from virtshim.guest.agents import AgentClients
from virtshim.guest.wait import ExecLimits
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout

CONTAINER = ContainerId("c" * 64)
SHELLS = ["dash", "bash", "busybox sh"]


@pytest.fixture
def layout() -> Iterator[Layout]:
    """In a short path: a socket's address holds 107 bytes."""
    directory = tempfile.mkdtemp(prefix="ga-")
    layout = Layout(state_dir=f"{directory}/state", run_dir=f"{directory}/run")
    Path(layout.socket_dir(CONTAINER)).mkdir(parents=True)
    yield layout
    shutil.rmtree(directory)


@pytest.fixture
def guests() -> Iterator[list[HostGuest]]:
    """What `make_guest` made."""
    made: list[HostGuest] = []
    yield made
    for guest in made:
        guest.close()


@pytest.fixture
def make_guest(layout: Layout, guests: list[HostGuest]) -> Callable[..., HostGuest]:
    def make(ports: int = 12, slots: int = 120) -> HostGuest:
        guests.append(HostGuest(Path(layout.socket_dir(CONTAINER)), ports, slots))
        return guests[-1]

    return make


@pytest.fixture(params=SHELLS)
def guest(request: pytest.FixtureRequest, make_guest: Callable[..., HostGuest]) -> HostGuest:
    """The scripts keep to what these shells have in common."""
    guest = make_guest()
    guest.shell = request.param.split()
    return guest


@pytest.fixture
def limits() -> ExecLimits:
    return ExecLimits()


@pytest.fixture
def clients(layout: Layout, guests: list[HostGuest], limits: ExecLimits) -> Iterator[AgentClients]:
    clients = AgentClients(layout, lambda _container, number: guests[-1].plug(number), limits=limits)
    yield clients
    clients.close()
