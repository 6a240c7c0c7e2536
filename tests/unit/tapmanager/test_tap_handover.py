"""A VM's process gets its taps' queues, and vhost-net for each of them or for none."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from fakes.vhost import FakeVhostNet

from tapmanager.cni.conf import NetworkConf
from tapmanager.errors import TapmanagerError
from tapmanager.keyed_locks import KeyedLocks
from tapmanager.ledger import Entry, Ledger, Phase, Placement
from tapmanager.links import netns, tap
from tapmanager.peer import Peer
from tapmanager.pod import Nic, Pod
from tapmanager.tap_handover import OpenTap, TapHandover

T = TypeVar("T")

SANDBOX = "0123456789abcdef" * 4
KEY = "c0ffee" * 10 + "abcd"


def soon() -> float:
    return time.monotonic() + 60


def nic(number: int, *, many: bool) -> Nic:
    mac = f"02:00:00:00:00:0{number}"
    return Nic(f"eth{number}", mac, mac, f"br{number}", mac, f"tap{number}", 1500, (), (), (), (), multi_queue=many)


class World:
    def __init__(self, folder: Path) -> None:
        self.vhost = FakeVhostNet()
        self.ledger = Ledger(str(folder), f"{folder}-placements")
        self.ledger.prepare()
        self.taps = TapHandover(self.ledger, KeyedLocks(), os.geteuid(), self.vhost)  # type: ignore[arg-type]
        self.given: list[int] = []
        self.opening = threading.Event()

    def attached(self, *nics: Nic) -> None:
        conf = NetworkConf("net", "1.0.0", ({"type": "bridge"},))
        pod = Pod(SANDBOX, "default", "web", "uid-1")
        self.ledger.write(Entry(Phase.ATTACHED, pod, "/run/netns/none", conf, (), KEY, nics=nics))

    def entry(self) -> Entry:
        found = self.ledger.read(SANDBOX)
        assert found is not None
        return found

    def fetched(self, queues: int, admit: Callable[[Placement], object] = lambda _placement: None) -> Sequence[OpenTap]:
        self.taps.arm(SANDBOX, Placement(queues=queues), soon())
        me = Peer(os.geteuid(), os.getpid())
        found = self.taps.fetch(SANDBOX, KEY, me, admit, soon())
        self.given += [fd for one in found for fd in (*one.fds, *one.vhost)]
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    def open_taps(taps: Sequence[tap.Wanted]) -> list[list[int]]:
        opening.set()
        counts = (one.queues if one.multi_queue else 1 for one in taps)
        return [[os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) for _ in range(count)] for count in counts]

    def at_once(_path: str, work: Callable[[], T]) -> T:
        return work()

    opening = threading.Event()
    monkeypatch.setattr(tap, "open_taps", open_taps)
    monkeypatch.setattr(netns, "run_inside", at_once)
    made = World(tmp_path)
    made.opening = opening
    yield made
    for fd in made.given:
        os.close(fd)


def test_each_queue_of_each_nic_has_a_descriptor_of_vhost_net(world: World) -> None:
    world.attached(nic(0, many=True), nic(1, many=True))
    found = world.fetched(4)
    assert [(len(one.fds), len(one.vhost)) for one in found] == [(4, 4), (4, 4)]
    assert [fd for one in found for fd in one.vhost] == world.vhost.opened


def test_a_small_vm_has_one_queue_and_one_vhost_net_descriptor(world: World) -> None:
    world.attached(nic(0, many=False))
    assert [(len(one.fds), len(one.vhost)) for one in world.fetched(1)] == [(1, 1)]


def test_without_vhost_net_a_vm_still_has_its_queues(world: World) -> None:
    world.vhost.wanted = False
    world.attached(nic(0, many=True))
    assert [(len(one.fds), len(one.vhost)) for one in world.fetched(2)] == [(2, 0)]


def test_an_earlier_vmwrapper_gets_no_vhost_net_descriptors(world: World) -> None:
    world.attached(nic(0, many=True))
    assert [(len(one.fds), len(one.vhost)) for one in world.fetched(0)] == [(1, 0)]
    assert world.vhost.opened == []


def test_the_taps_are_opened_while_the_process_moves_into_its_cgroup(world: World) -> None:
    world.attached(nic(0, many=False))
    assert (
        len(world.fetched(1, admit=lambda _: world.opening.wait(10) or pytest.fail("the taps wait for the move"))) == 1
    )


def test_a_process_that_cannot_be_moved_gets_no_descriptor(world: World) -> None:
    def refused(_: Placement) -> None:
        world.opening.wait(10)
        raise TapmanagerError("internal", "QEMU cannot be moved")

    world.attached(nic(0, many=True), nic(1, many=False))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TapmanagerError, match="cannot be moved"):
        world.fetched(2, admit=refused)
    assert os.listdir("/proc/self/fd") == before


def test_the_record_says_who_takes_the_taps_before_the_process_moves(world: World) -> None:
    recorded: list[str] = []
    world.attached(nic(0, many=False))
    world.fetched(1, admit=lambda _: recorded.append(world.entry().placement.taken_by))
    assert recorded != [""]
