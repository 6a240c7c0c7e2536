"""The beginning of each script that tests run in a process of its own; see conftest.py."""

import dataclasses
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.image import DiskFormat
from virtshim.model.vm import Backing, Disk, DiskBus, VmSize, VmSpec
from virtshim.system.logsetup import set_up_logging
from virtshim.vm import embed
from virtshim.vm.connection import Connection
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.driver import LibvirtHypervisor
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.resize import LibvirtResizing
from vmwrapper import bundle

set_up_logging("warning", "text")  # to standard error: `say` uses standard output

PLACE = Path(sys.argv[1])
QEMU = "/usr/bin/qemu-system-x86_64"
CONTAINER = ContainerId("a" * 64)
SPEC = VmSpec(
    uuid=CONTAINER.domain_uuid(),
    name="virtshim-integration",
    container_id=CONTAINER,
    sandbox_id=SandboxId("b" * 64),
    size=VmSize(vcpus=1, memory_bytes=32 << 20),
    disk_bus=DiskBus.SCSI,
    disks=(
        Disk(
            str(PLACE / "vm/root.qcow2"),
            DiskFormat.QCOW2,
            "root",
            backing=Backing(str(PLACE / "vm/base.raw"), DiskFormat.RAW),
        ),
        Disk(str(PLACE / "vm/seed.iso"), DiskFormat.RAW, "seed", readonly=True, cdrom=True),
    ),
    console_socket=str(PLACE / "s/console.sock"),
    console_log=str(PLACE / "vm/console.log"),
    agent_socket=str(PLACE / "s/agent.sock"),
)

URI = embed.prepare(str(PLACE / "l"), embed.qemu_user())
cgroups = Cgroups.OFF
if "libvirt-cgroups" in sys.argv[2:]:
    cgroups = Cgroups.V2 if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else Cgroups.V1
    conf = PLACE / "l/etc/qemu.conf"
    conf.write_text(conf.read_text().replace("[ ]", '[ "cpu", "cpuacct", "cpuset", "devices", "memory" ]', 1))
profile = NodeProfile("node", DomainType.QEMU, QEMU, QEMU, cgroups)
if "vmwrapper" in sys.argv[2:]:
    bundle.write(str(PLACE / "vm/vmwrapper"))
    profile = dataclasses.replace(profile, vmwrapper=str(PLACE / "vm/vmwrapper"), output_pipes=embed.output_pipes(URI))
connection = Connection(URI)
hypervisor = LibvirtHypervisor(connection, profile, URI)
resizing = LibvirtResizing(connection, profile)
connection.start()
assert connection.wait_open(60), connection.trouble()


def say(value):
    print("SAID " + json.dumps(value), flush=True)


def state():
    power = hypervisor.power(SPEC.uuid)
    return [power.power.value, power.reason.value]


def qemu_pid():
    return int((PLACE / "l/run/qemu" / (SPEC.name + ".pid")).read_text())


def boot(spec=SPEC):
    hypervisor.define(spec)
    hypervisor.start(spec.uuid)
    wait_for_log(b"guest is up", 1)


def wait_for_log(words, times):
    until = time.monotonic() + 60
    while Path(SPEC.console_log).read_bytes().count(words) < times:
        assert time.monotonic() < until, Path(SPEC.console_log).read_bytes()
        time.sleep(0.02)


def type_into_console(text):
    with socket.socket(socket.AF_UNIX) as console:
        console.settimeout(30)
        console.connect(SPEC.console_socket)
        console.sendall(text)
        assert console.recv(1) == text[:1]


def wait_off():
    with hypervisor.watching(SPEC.uuid) as event:
        while not hypervisor.power(SPEC.uuid).has_ended:
            assert event.wait(30)
            event.clear()


_ = dataclasses, os, threading
