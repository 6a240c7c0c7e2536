"""If libvirt starts a pod's VM again while virtshim is stopped, that VM gets no network, and the pod keeps its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from guest import BOOT
from mortal_node import MortalNode
from podclient import container_config, wait_until
from work import Work

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.hostile]

# An embedded driver of its own; the VM stays when it ends. The one VM that is off.
_START = """
import os, sys, threading, libvirt
from lxml import etree
libvirt.virEventRegisterDefaultImpl()
def serve():
    while True:
        libvirt.virEventRunDefaultImpl()
threading.Thread(target=serve, daemon=True).start()
libvirt_ = libvirt.open(sys.argv[1])
while not (off := libvirt_.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_INACTIVE)):
    threading.Event().wait(0.1)  # its threads still look for QEMUs
definition = etree.fromstring(off[0].XMLDesc().encode())
pipe = definition.find("{*}commandline/{*}env[@name='VIRTSHIM_OUTPUT']").get("value")
os.mkfifo(pipe)  # or it is refused before
os.chmod(pipe, 0o666)
for image in definition.iterfind("devices/disk/backingStore/source[@fdgroup]"):
    off[0].FDAssociate(image.get("fdgroup"), [os.open(image.get("file"), os.O_RDONLY)], 0)  # or it is refused before
try:
    off[0].create()
except libvirt.libvirtError as exc:
    print(exc, flush=True)
os.unlink(pipe)
os._exit(0)
"""


def answers(address: str) -> bool:
    return subprocess.run(["ping", "-c", "1", "-w", "2", address], capture_output=True, check=False).returncode == 0


def test_a_vm_that_virtshim_did_not_start_gets_no_taps_but_the_pods_next_vm_does(
    mortal: MortalNode, work: Work
) -> None:
    work.run()
    work.container = work.cri.create(work.pod, container_config(work.image, 64 << 20), work.config)
    work.start()
    address = work.cri.pod_ip(work.pod)
    assert mortal.bystander is not None
    for name in ("virtshim", "tapmanager"):
        mortal.kill(name)
    for pid in mortal.qemu_pids() - mortal.bystander.pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: mortal.qemu_pids() == mortal.bystander.pids, 20, "it is off")
    mortal.start("tapmanager")
    done = subprocess.run(
        [sys.executable, "-c", _START, mortal.settings.libvirt.uri],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "its key works for one start by virtshim" in done.stdout
    wait_until(lambda: mortal.qemu_pids() == mortal.bystander.pids, 20, "it did not start")
    mortal.up()
    assert work.cri.status(work.container).state == pb.CONTAINER_EXITED
    image = work.cri.pull(f"{mortal.image_url}/guest.qcow2")
    work.container = work.cri.create(work.pod, container_config(image, attempt=1), work.config)
    work.start()
    wait_until(lambda: answers(address), BOOT, "the next guest has the pod's address, by DHCP")
    work.stop()
    assert work.cri.status(work.container).state == pb.CONTAINER_EXITED
