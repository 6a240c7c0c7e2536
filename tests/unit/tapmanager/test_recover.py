"""tapmanager starts with what an earlier process left, whatever is wrong with one pod, and names that pod."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from pyroute2.netlink.exceptions import NetlinkDecodeError, NetlinkError

from tapmanager import attachments
from tapmanager.attachments import Attachments, AttachmentSettings
from tapmanager.cni.conf import NetworkConf
from tapmanager.cni.plugins import CniPlugins
from tapmanager.dhcp.opened import Beside, GuestNic
from tapmanager.dhcp.server import DhcpServer
from tapmanager.drivers import PciDrivers
from tapmanager.errors import internal, unavailable
from tapmanager.ledger import Entry, Ledger, Phase
from tapmanager.links import netns, pod_links
from tapmanager.pod import Nic, Pod
from tapmanager.sriov.host_links import NetlinkHostLinks
from tapmanager.sriov.nic_functions import NicFunctions
from tapmanager.sriov.physical_function import PhysicalFunctions

T = TypeVar("T")

GOOD, BAD, OTHER = (digits * 32 for digits in ("0a", "1b", "2c"))
MAC = "02:00:00:00:00:01"
# The NIC's tap is `lo`, which exists on every machine.
NIC = Nic("eth0", MAC, MAC, "br0", MAC, "lo", 1500, (), (), (), ())


class World:
    """tapmanager's pods, in whose namespaces nothing is done; `serving` one that is in `broken` fails so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger = Ledger(str(folder), f"{folder}-placements")
        self.ledger.prepare()
        self.broken: dict[str, Exception] = {}
        self.served: list[str] = []
        self.guarded: list[Sequence[Nic]] = []
        self.dhcp = DhcpServer()
        links = NetlinkHostLinks()
        self.pods = Attachments(
            self.ledger,
            CniPlugins(str(folder), (), 1.0),
            self.dhcp,
            AttachmentSettings(str(folder), (), 0, 1.0),
            NicFunctions(PciDrivers(), links, PhysicalFunctions(links)),
        )
        monkeypatch.setattr(attachments, "open_nics", self._open)
        monkeypatch.setattr(netns, "run_inside", _at_once)
        monkeypatch.setattr(netns, "exists", lambda path: True)
        monkeypatch.setattr(pod_links, "renew_guard", self.guarded.append)

    def _open(self, entry: Entry, beside: Beside) -> Sequence[GuestNic]:
        assert beside is self.dhcp.beside
        if entry.pod.sandbox in self.broken:
            raise self.broken[entry.pod.sandbox]
        self.served.append(entry.pod.sandbox)
        return []

    def attached(self, *sandboxes: str) -> None:
        conf = NetworkConf("net", "1.0.0", ({"type": "bridge"},))
        for sandbox in sandboxes:
            pod = Pod(sandbox, "default", "web", "uid-1")
            self.ledger.write(Entry(Phase.ATTACHED, pod, "/run/netns/none", conf, (), "c0" * 32, nics=(NIC,)))

    def lost(self) -> dict[str, str]:
        return dict(self.pods.lost(time.monotonic() + 60))


def _at_once(_path: str, work: Callable[[], T]) -> T:
    return work()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path, monkeypatch)
    made.dhcp.start()
    yield made
    made.dhcp.stop()


def named(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The sandboxes that the log says were not recovered."""
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return {line.split("sandbox=")[1].split()[0] for line in said if line.startswith("pod.not_recovered")}


@pytest.mark.parametrize(
    "failure",
    [
        NetlinkError(errno.EINVAL, "refused"),
        NetlinkDecodeError(ValueError("half a message")),
        KeyError("attrs"),
        internal("the kernel refused"),
    ],
    ids=["refused", "unreadable answer", "not foreseen", "told"],
)
def test_any_failure_of_one_pod_loses_that_pod_only(
    world: World, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    world.attached(GOOD, BAD, OTHER)
    world.broken[BAD] = failure
    world.pods.recover()
    assert world.served == [GOOD, OTHER]
    assert named(caplog) == {BAD}
    assert set(world.lost()) == {BAD}
    assert "cannot be served" in world.lost()[BAD]


def test_a_pod_that_can_be_served_later_is_not_lost(world: World) -> None:
    world.attached(GOOD, BAD)
    world.broken[BAD] = internal("the kernel refused")
    world.pods.recover()
    world.broken.clear()
    assert world.lost() == {}
    assert world.served == [GOOD, BAD]
    assert world.lost() == {}
    assert world.served == [GOOD, BAD], "once"


@pytest.mark.parametrize(
    "failure", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), unavailable("no nf_tables"), MemoryError()]
)
def test_a_lack_of_node_resources_loses_no_pod(
    world: World, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    world.attached(BAD)
    world.broken[BAD] = failure
    world.pods.recover()
    assert named(caplog) == {BAD}
    assert world.lost() == {}
    world.broken.clear()
    world.lost()
    assert world.served == [BAD]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000], ids=["nothing", "half", "bytes", "a list", "deep"]
)
def test_a_pod_with_a_malformed_record_is_named_and_left_running(
    world: World, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    """What it had is not known, so it could not be released either, and kubelet replaces no pod of which that fails."""
    world.attached(GOOD, BAD)
    Path(world.ledger.path(BAD)).write_bytes(data)
    world.pods.recover()
    assert world.served == [GOOD]
    assert named(caplog) == {BAD}
    assert world.lost() == {}


@pytest.mark.parametrize("changes", [{"version": 2}, {"of_a_newer_version": 1}], ids=["version", "field"])
def test_a_newer_versions_record_is_named_and_its_pod_left_running(
    world: World, caplog: pytest.LogCaptureFixture, changes: dict[str, object]
) -> None:
    world.attached(GOOD, BAD)
    path = Path(world.ledger.path(BAD))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    world.pods.recover()
    assert world.served == [GOOD]
    assert named(caplog) == {BAD}
    assert world.lost() == {}


def test_a_pods_packet_filters_are_renewed_before_its_guest_is_served(world: World) -> None:
    """An earlier version's let router advertisements and DHCPv6 of others through."""
    nic = dataclasses.replace(NIC, addresses=("fd00::5/64",))
    world.attached(GOOD)
    entry = world.ledger.read(GOOD)
    assert entry is not None
    world.ledger.write(dataclasses.replace(entry, nics=(nic,)))
    world.broken[GOOD] = OSError(errno.ENETDOWN, os.strerror(errno.ENETDOWN))
    world.pods.recover()
    assert world.guarded == [(nic,)]
