"""The bare counterparts of a VM's start are the same domain on plain QEMU, started by libvirt with its defaults, and
the same QEMU command line without libvirt. The network card's tap exists already, as a pod's does; libvirt creates a
cgroup for the VM."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import libvirt
from lxml import etree
from node import Node

_TAP = "bench-tap"
_NIC = f"""
<interface type="ethernet">
  <target dev="{_TAP}" managed="no"/><model type="virtio"/><driver name="qemu"/><mtu size="1500"/><rom enabled="no"/>
</interface>"""
_QEMU_NS = "http://libvirt.org/schemas/domain/qemu/1.0"


class BareLibvirt:
    """An embedded libvirt of its own (only one process may open a root), with the node's qemu.conf."""

    def __init__(self, directory: str, node: Node) -> None:
        self._directory = f"{directory}/b"
        self._node = node
        self._domain: libvirt.virDomain | None = None

    def __enter__(self) -> Self:
        for folder in ("etc", "vm"):  # an earlier section of this process may have had them: one process has one root
            os.makedirs(f"{self._directory}/{folder}", mode=0o711, exist_ok=True)
        conf = Path(f"{self._node.directory}/libvirt/etc/qemu.conf").read_text()
        assert conf.count("cgroup_controllers = [ ]") == 1, conf
        conf = conf.replace("cgroup_controllers = [ ]", 'cgroup_controllers = [ "cpu", "cpuacct", "cpuset", "memory" ]')
        Path(f"{self._directory}/etc/qemu.conf").write_text(conf)
        subprocess.run(["ip", "tuntap", "add", "dev", _TAP, "mode", "tap"], check=True)
        subprocess.run(["ip", "link", "set", _TAP, "up"], check=True)
        self._groups = _machine_groups()
        _run_events()
        self._connection = libvirt.open(f"qemu:///embed?root={self._directory}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self.remove()
        self._connection.close()
        subprocess.run(["ip", "link", "delete", _TAP], check=True)
        for group in _machine_groups() - self._groups:  # libvirt leaves the parent of its VMs' groups behind
            with contextlib.suppress(OSError):  # another libvirt has a VM there now
                os.rmdir(group)

    def define_like(self, container: str) -> None:
        """The XML of that container's VM in libvirt, with plain QEMU, another name and other paths, and the network card
        that vmwrapper adds."""
        folder = f"{self._node.directory}/libvirt/etc/qemu"
        (name,) = [file for file in os.listdir(folder) if container[:12] in file and file.endswith(".xml")]
        root = etree.parse(f"{folder}/{name}").getroot()
        root = root if root.tag == "domain" else root.find("domain")
        for ours in ("commandline", "capabilities"):
            for element in root.findall(f"{{{_QEMU_NS}}}{ours}"):
                root.remove(element)
        root.find("devices").append(etree.fromstring(_NIC))
        root.find("name").text = "bare"
        root.find("uuid").text = str(uuid.uuid4())
        root.find("devices/emulator").text = "/usr/bin/qemu-system-x86_64"
        _with_open_images(root, f"{self._directory}/vm")
        text = etree.tostring(root).decode()
        old = f"{self._node.directory}/state/containers/{container}"
        new = f"{self._directory}/vm/disks"
        shutil.rmtree(new, ignore_errors=True)
        subprocess.run(["cp", "-a", old, new], check=True)
        text = text.replace(old, new).replace(
            f"{self._node.directory}/run/vm/{container[:20]}", f"{self._directory}/vm"
        )
        self._domain = self._connection.defineXML(text)

    def start(self) -> None:
        assert self._domain is not None
        self._domain.create()

    @property
    def console_log(self) -> str:
        return f"{self._directory}/vm/disks/console.log"

    def save(self, file: str) -> None:
        """As `virsh save` does: the domain is off afterwards."""
        assert self._domain is not None
        self._domain.save(file)

    def restore(self, file: str) -> None:
        self._connection.restore(file)

    def start_qemu(self) -> float:
        """Milliseconds from exec of that domain's QEMU command line, with a monitor and without its network card, until
        the monitor has answered and the guest's CPUs run."""
        assert self._domain is not None
        if self._domain.isActive():
            self._domain.destroy()
        text = self._connection.domainXMLToNative("qemu-argv", _without_nic(self._domain.XMLDesc()), 0)
        monitor = f"{self._directory}/qmp"
        words = _plain(shlex.split(text.replace("\\\n", " ")), monitor)
        started = time.monotonic()
        process = subprocess.Popen(words, env={"PATH": os.defpath, "HOME": self._directory}, cwd="/")
        try:
            with connected(monitor, process) as file:
                ask(file, "cont")
            return (time.monotonic() - started) * 1000
        finally:
            process.kill()
            process.wait()

    def remove(self) -> None:
        if self._domain is not None:
            if self._domain.isActive():
                self._domain.destroy()
            self._domain.undefine()
            self._domain = None


def _with_open_images(domain: etree._Element, directory: str) -> None:
    """Lets libvirt's user open images by name; virtshim passes descriptors instead."""
    for source in domain.iterfind("devices/disk/backingStore/source[@fdgroup]"):
        path = f"{directory}/{source.attrib.pop('fdgroup')}"
        shutil.copyfile(source.get("file"), path)
        os.chmod(path, 0o644)
        source.set("file", path)


def _without_nic(xml: str) -> str:
    root = etree.fromstring(xml)
    for nic in root.findall("devices/interface"):
        root.find("devices").remove(nic)
    return etree.tostring(root, encoding="unicode")


def _plain(words: list[str], monitor: str) -> list[str]:
    """libvirt's command line without the environment, descriptors, secrets and sandbox user that only libvirt can
    provide."""
    while "=" in words[0] and not words[0].startswith("/"):
        words = words[1:]
    plain = [words[0]]
    position = 1
    while position < len(words):
        option = words[position]
        has_value = position + 1 < len(words) and not words[position + 1].startswith("-")
        value = words[position + 1] if has_value else ""
        position += 2 if has_value else 1
        if (option == "-object" and '"secret"' in value) or option == "-add-fd":
            continue
        if option == "-chardev" and "id=charmonitor" in value:
            value = f"socket,id=charmonitor,path={monitor},server=on,wait=off"
        value = re.sub(r",logfile=/dev/fdset/\d+,logappend=on", "", value)
        plain += [option, value] if has_value else [option]
    return plain


@contextlib.contextmanager
def connected(path: str, process: subprocess.Popen[bytes]) -> Iterator[IO[bytes]]:
    """A connection to QEMU's monitor, ready for commands."""
    with socket.socket(socket.AF_UNIX) as client:
        until = time.monotonic() + 30
        while True:
            try:
                client.connect(path)
                break
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    raise
                time.sleep(0.001)
        with client.makefile("rwb") as file:
            file.readline()
            ask(file, "qmp_capabilities")
            yield file


def ask(monitor: IO[bytes], command: str) -> None:
    monitor.write(json.dumps({"execute": command}).encode())
    monitor.flush()
    while "return" not in json.loads(monitor.readline()):
        pass


def _machine_groups() -> set[str]:
    return set(glob.glob("/sys/fs/cgroup/machine") + glob.glob("/sys/fs/cgroup/*/machine"))


@functools.cache
def _run_events() -> None:
    """Once in a process: libvirt has one loop."""
    libvirt.virEventRegisterDefaultImpl()
    threading.Thread(target=_events, daemon=True).start()


def _events() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()
