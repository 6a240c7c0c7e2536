"""virtshim is away, tapmanager was restarted, and a pod's VM is started again by libvirt alone: it gets its network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from guest import BOOT
from mortal_node import MortalNode
from podclient import container_config, wait_for_log, wait_until
from work import Work

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults]

# An embedded driver of its own; the VM stays when it ends. The one VM that is off.
_START = """
import os, sys, threading, libvirt
libvirt.virEventRegisterDefaultImpl()
def serve():
    while True:
        libvirt.virEventRunDefaultImpl()
threading.Thread(target=serve, daemon=True).start()
libvirt_ = libvirt.open(sys.argv[1])
while not (off := libvirt_.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_INACTIVE)):
    threading.Event().wait(0.1)  # its threads still look for QEMUs
off[0].create()
os._exit(0)
"""


def answers(address: str) -> bool:
    return subprocess.run(["ping", "-c", "1", "-w", "2", address], capture_output=True, check=False).returncode == 0


def test_a_vm_started_while_virtshim_is_away_gets_its_taps_and_its_lease_from_a_restarted_tapmanager(
    mortal: MortalNode, work: Work
) -> None:
    work.run()
    image = work.cri.pull(f"{mortal.image_url}/guest.qcow2")
    work.container = work.cri.create(work.pod, container_config(image), work.config)
    work.start()
    log = work.cri.status(work.container).log_path
    address = work.cri.pod_ip(work.pod)
    wait_for_log(log, "virtshim-guest: ready", BOOT)
    assert mortal.bystander is not None
    for name in ("virtshim", "tapmanager"):
        mortal.kill(name)
    for pid in mortal.qemu_pids() - mortal.bystander.pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: mortal.qemu_pids() == mortal.bystander.pids, 20, "it is off")
    assert not answers(address)
    mortal.start("tapmanager")
    done = subprocess.run(
        [sys.executable, "-c", _START, mortal.settings.libvirt.uri],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wait_until(lambda: answers(address), BOOT, "the guest has its address, by DHCP")
    running = mortal.qemu_pids()
    mortal.up()
    assert work.cri.status(work.container).state == pb.CONTAINER_RUNNING
    assert mortal.qemu_pids() == running
    wait_until(lambda: answers(address), 10, "its network is the same")
    work.stop()
    assert work.cri.status(work.container).state == pb.CONTAINER_EXITED
