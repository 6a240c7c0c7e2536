"""Each test here runs on the fake, on libvirt's test driver, and on libvirt's embedded driver with real QEMU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest
from contract.hypervisor.worlds import Connected, World, connected_to, fake_world, libvirt_world, missing

from virtshim.vm import embed
from virtshim.vm.elements.processors import DomainType


@pytest.fixture(scope="session")
def embedded() -> Iterator[tuple[libvirt.virConnect, Connected]]:
    """One embedded libvirt for all tests: a process can have one root only, and open it a few times only, because libvirt's
    table of drivers fills up. The root is below /var/tmp, which QEMU's user can reach."""
    with tempfile.TemporaryDirectory(prefix="hv-", dir="/var/tmp") as root:
        uri = embed.prepare(root, embed.qemu_user())
        with connected_to(uri, DomainType.QEMU) as connected:
            beside = libvirt.open(uri)
            yield beside, connected
            beside.close()


@pytest.fixture(params=["fake", "test-driver", "qemu"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield from _world(request)


@pytest.fixture(params=["fake", "qemu"])
def world_with_memory(request: pytest.FixtureRequest) -> Iterator[World]:
    """Without libvirt's test driver, whose VMs have no memory."""
    yield from _world(request)


def _world(request: pytest.FixtureRequest) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="hv-vm-", dir="/var/tmp") as name:
        directory = Path(name)
        directory.chmod(0o711)
        if request.param == "fake":
            yield from fake_world(directory)
        elif request.param == "test-driver":
            with connected_to("test:///default", DomainType.TEST) as connected:
                beside = libvirt.open("test:///default")
                yield from libvirt_world(beside, DomainType.TEST, connected, directory)
                beside.close()
        else:
            if why := missing():
                pytest.skip(why)
            beside, connected = request.getfixturevalue("embedded")
            yield from libvirt_world(beside, DomainType.QEMU, connected, directory)
