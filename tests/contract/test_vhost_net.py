"""The fake, and the kernel's vhost-net where it works, fulfil one contract. It always works in
tests/vfio/chapter_vhost.py."""

from __future__ import annotations

import os

import pytest
from fakes.vhost import FakeVhostNet

from tapmanager.links.tap import VhostNet, vhost_trouble

Offered = VhostNet | FakeVhostNet


@pytest.fixture(params=["in_memory", "kernel"])
def offered(request: pytest.FixtureRequest) -> Offered:
    if request.param == "in_memory":
        return FakeVhostNet()
    if why := vhost_trouble():
        pytest.skip(f"NOT TO BE HAD HERE: vhost-net ({why})")
    return VhostNet()


def test_each_queue_has_a_descriptor_that_is_not_inherited(offered: Offered) -> None:
    fds = offered.open(3)
    try:
        assert len(set(fds)) == 3
        assert not any(os.get_inheritable(fd) for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)


def test_each_call_returns_new_descriptors(offered: Offered) -> None:
    first, second = offered.open(2), offered.open(2)
    assert set(first).isdisjoint(second)
    for fd in (*first, *second):
        os.close(fd)


def test_there_are_no_descriptors_if_vhost_net_is_disabled(offered: Offered) -> None:
    offered.wanted = False
    assert offered.open(2) == []
