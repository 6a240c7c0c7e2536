"""A VM gets as many tap descriptors for a NIC as its start requests, and meanwhile others get none."""

from __future__ import annotations

import fcntl
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address

import pytest
from tap_node import TapNode, sandbox
from toy_guest import ToyGuest

from tapmanager import protocol

pytestmark = pytest.mark.network

_TUNGETIFF = 0x800454D2
_TUNSETQUEUE = 0x400454D9
_DETACHED = 0x0400
_NAME, _FLAGS = slice(0, 16), slice(16, 18)


@contextmanager
def opened(
    node: TapNode, which: str, network: dict[str, object], queues: int | None
) -> Iterator[tuple[dict, list[int]]]:
    node.arm(which, queues=queues)
    args = {"sandbox": which, "key": network["fetch_key"]}
    answer, fds = protocol.call(node.socket, "fetch", args, 10.0)
    try:
        yield answer["interfaces"][0], fds
    finally:
        protocol.close_all(fds)


def tap_of(fd: int) -> str:
    return fcntl.ioctl(fd, _TUNGETIFF, bytes(40))[_NAME].rstrip(b"\0").decode()


def test_each_start_decides_the_number_of_queues(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which, multi_queue=True)
    for queues in (4, 2, 8):
        with opened(tap_node, which, network, queues) as (nic, fds):
            assert (len(fds), nic["queues"]) == (queues, queues)
            assert {tap_of(fd) for fd in fds} == {"tap0"}
    tap_node.release(which)


def test_a_single_queue_works_as_in_earlier_versions(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which)
    with opened(tap_node, which, network, 1) as (nic, fds):
        assert set(nic) == {"mac", "mtu"}
        (fd,) = fds
        (flags,) = struct.unpack("H", fcntl.ioctl(fd, _TUNGETIFF, bytes(40))[_FLAGS])
        assert flags & 0x0100 == 0  # IFF_MULTI_QUEUE
    tap_node.release(which)


@pytest.mark.parametrize("many", [True, False])
def test_a_virtshim_of_an_earlier_version_gets_one_descriptor(tap_node: TapNode, many: bool) -> None:
    which = sandbox()
    network = tap_node.attach(which, **({"multi_queue": True} if many else {}))
    with opened(tap_node, which, network, None) as (nic, fds):
        assert (set(nic), len(fds)) == ({"mac", "mtu"}, 1)
    tap_node.release(which)


def test_a_pod_attached_for_one_queue_keeps_one_queue_and_a_warning_is_logged(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which)
    with opened(tap_node, which, network, 4) as (nic, fds):
        assert ("queues" in nic, len(fds)) == (False, 1)
    assert f"tap.one_queue sandbox={which} wanted=4" in tap_node.log.read_text()
    tap_node.release(which)


def test_nobody_else_gets_a_queue_of_a_vm_even_a_disabled_one(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which, multi_queue=True)
    args = {"sandbox": which, "key": network["fetch_key"]}
    with opened(tap_node, which, network, 2) as (_, fds):
        for fd in fds:  # as QEMU does for a guest that has not asked for them
            fcntl.ioctl(fd, _TUNSETQUEUE, struct.pack("16sH22x", b"", _DETACHED))
        tap_node.arm(which, queues=2)
        with pytest.raises(protocol.RemoteError, match="in use by another process") as refused:
            protocol.call(tap_node.socket, "fetch", args, 20.0)
        assert refused.value.kind == "failed-precondition"
    with opened(tap_node, which, network, 2) as (_, fds):
        assert len(fds) == 2
    tap_node.release(which)


def test_a_tap_with_several_queues_passes_packets_and_survives_tapmanager(tap_node: TapNode) -> None:
    which = sandbox()
    network = tap_node.attach(which, multi_queue=True)
    tap_node.stop()
    tap_node.start()
    with opened(tap_node, which, network, 2) as (nic, fds):
        assert nic["queues"] == 2
    nics, fds = tap_node.fetch(which, network["fetch_key"])
    with ToyGuest(fds[0], nics[0]["mac"]) as guest:
        guest.boot()
        gateway = IPv4Address(f"{tap_node.subnet}.1")
        guest.ping(guest.resolve(gateway), gateway)
    record = json.loads((tap_node.ledger / f"{which}.json").read_text())
    assert record["nics"][0]["multi_queue"] is True
    tap_node.release(which)
