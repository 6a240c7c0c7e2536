"""vhost-net moves packets in a real kernel. chapter_vhost.py has the actions."""

from __future__ import annotations

from typing import Any

import pytest
from chapter_vhost import ANSWER, QUEUES

from tapmanager.links.tap import VHOST_DEVICE

pytestmark = [pytest.mark.devices, pytest.mark.timeout(2800)]


@pytest.fixture(autouse=True)
def _with_the_module(told):
    if not told("vhost: the kernel's")["there"]:
        pytest.skip("NOT TO BE HAD HERE: vhost-net (machine/packages.sh could not bring a kernel that has it)")


def test_vhost_net_is_detected_once_its_module_is_loaded(told: Any) -> None:
    kernels = told("vhost: the kernel's")
    assert kernels["before"].startswith(VHOST_DEVICE)
    assert kernels["after"] == ""
    assert kernels["descriptors"] == [[VHOST_DEVICE, False]] * 3


def test_a_confined_qemu_has_a_vhost_descriptor_and_kernel_thread_for_each_queue(told: Any) -> None:
    guest = told("vhost: in the guest")
    assert guest["netdev"] == "tap,id=virtshimnet0,fds=N:N,vhost=on,vhostfds=N:N"
    assert f"mq=on,vectors={2 * QUEUES + 2}" in guest["device"]
    assert guest["descriptors"] == guest["threads"] == QUEUES
    assert guest["user"] != 0


def test_packets_pass_both_ways(told: Any) -> None:
    (nic,) = [line for line in told("vhost: in the guest")["console"] if line.startswith("virtio-net ")]
    assert nic.endswith(f'sent=60 heard="{ANSWER}"')


def test_vhost_threads_end_with_the_vm(told: Any) -> None:
    assert told("vhost: removed")["threads"] == 0
