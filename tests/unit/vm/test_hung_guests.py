"""A QEMU that does not answer, or a guest that keeps its memory, does not block calls that can end the VM."""

import contextlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import libvirt
import pytest

from virtshim.model.errors import Aborted, DeadlineExceeded
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.pause import LibvirtPausing
from virtshim.vm.resize import LibvirtResizing

VM = uuid.uuid4()
PROFILE = NodeProfile("node", DomainType.QEMU, "/usr/bin/qemu", "/usr/bin/qemu", Cgroups.OFF)
LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
MIB = 1 << 20
OWNER = f"<v:owner xmlns:v='https://virtshim.io/domain/1' node='node' container='{'c' * 64}' sandbox='{'5' * 64}'/>"
WAIT_LIMIT = 30.0


class Domain:
    """A running one, which answers its monitor once `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.resumed = threading.Event()
        self.memory = 512 * MIB
        self.asked: list[tuple[int, int]] = []
        # What the guest says next of its memory, each after one look; the last one stays.
        self.readings: list[dict[str, int]] = [{}]
        self.periods: list[int] = []

    def state(self) -> list[int]:
        return [libvirt.VIR_DOMAIN_RUNNING, 0]

    def suspend(self) -> None:
        assert self.answers.wait(WAIT_LIMIT)

    def resume(self) -> None:
        assert self.answers.wait(WAIT_LIMIT)
        self.resumed.set()

    def diskErrors(self) -> dict[str, int]:  # noqa: N802  libvirt's
        assert self.answers.wait(WAIT_LIMIT)
        return {}

    def name(self) -> str:
        return "virtshim-test"

    def isActive(self) -> int:  # noqa: N802
        return 1

    def maxMemory(self) -> int:  # noqa: N802
        return 1024 * MIB >> 10

    def memoryStats(self) -> dict[str, int]:  # noqa: N802
        said = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        return {"actual": self.memory >> 10, **said}

    def setMemoryStatsPeriod(self, seconds: int, flags: int) -> None:  # noqa: N802
        assert flags == LIVE
        self.periods.append(seconds)

    def setMemoryFlags(self, kib: int, flags: int) -> None:  # noqa: N802
        self.asked.append((kib << 10, flags))

    def metadata(self, _kind: int, _namespace: str) -> str:
        return OWNER


class Connected:
    """To a libvirt with one VM."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain

    @contextlib.contextmanager
    def using(self, _what: str) -> Iterator["Connected"]:
        yield self

    def lookupByUUID(self, wanted: bytes) -> Domain:  # noqa: N802
        assert wanted == VM.bytes
        return self.domain


@pytest.fixture
def domain() -> Iterator[Domain]:
    made = Domain()
    yield made
    made.answers.set()


@pytest.fixture
def pausing(domain: Domain) -> LibvirtPausing:
    connection: Any = Connected(domain)
    return LibvirtPausing(connection, PROFILE, limit=0.0)


@pytest.mark.parametrize("action", ["pause", "resume", "out_of_space"])
def test_a_qemu_that_does_not_answer_is_given_up(pausing: LibvirtPausing, action: str) -> None:
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=f"VM {VM}: its QEMU does not answer"):
            getattr(pausing, action)(VM)


def test_a_pause_that_takes_effect_after_its_deadline_is_undone(pausing: LibvirtPausing, domain: Domain) -> None:
    with pytest.raises(DeadlineExceeded):
        pausing.pause(VM)
    domain.answers.set()
    assert domain.resumed.wait(WAIT_LIMIT), "the VM stands still, and no record says why"


def test_a_guest_whose_vm_is_being_ended_is_not_waited_for(domain: Domain) -> None:
    connection: Any = Connected(domain)
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Aborted, match="being stopped"):
        LibvirtResizing(connection, PROFILE).set_memory(VM, 256 * MIB, WAIT_LIMIT, cancelled)
    assert domain.asked == [(256 * MIB, LIVE), (512 * MIB, LIVE)]


def reading(mib_free: int, second: int) -> dict[str, int]:
    return {"usable": mib_free * MIB >> 10, "last_update": second}


def memory_in_use(domain: Domain, cancelled: threading.Event) -> int | None:
    connection: Any = Connected(domain)
    return LibvirtResizing(connection, PROFILE).memory_in_use(VM, cancelled)


def test_a_guests_memory_use_is_read_after_its_balloon_has_moved(
    domain: Domain,
) -> None:
    domain.readings = [reading(400, 10), reading(400, 10), reading(100, 11)]
    assert memory_in_use(domain, threading.Event()) == 412 * MIB
    assert domain.periods[0] == 1, "asked often meanwhile"
    assert domain.periods[-1] > 1, "and then as seldom as before"


def test_the_memory_use_of_a_silent_guest_is_unknown(domain: Domain) -> None:
    domain.readings = [reading(400, 10)]
    assert memory_in_use(domain, threading.Event()) is None
    domain.readings = [{}]
    assert memory_in_use(domain, threading.Event()) is None


def test_a_guest_whose_vm_is_being_ended_is_not_asked_for_its_memory(domain: Domain) -> None:
    domain.readings = [reading(400, 10)]
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Aborted, match="being stopped"):
        memory_in_use(domain, cancelled)
    assert domain.periods[-1] > 1
