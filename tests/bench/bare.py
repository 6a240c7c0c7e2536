"""The bare counterpart: the same domain on plain QEMU, started by libvirt alone. Its network card's tap is there already, as a
pod's is, and it is in a cgroup of its own, which libvirt makes."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import threading
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

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
        os.makedirs(f"{self._directory}/etc", mode=0o711)
        os.makedirs(f"{self._directory}/vm", mode=0o711)
        conf = Path(f"{self._node.directory}/libvirt/etc/qemu.conf").read_text()
        assert conf.count("cgroup_controllers = [ ]") == 1, conf
        conf = conf.replace("cgroup_controllers = [ ]", 'cgroup_controllers = [ "cpu", "cpuacct", "cpuset", "memory" ]')
        Path(f"{self._directory}/etc/qemu.conf").write_text(conf)
        subprocess.run(["ip", "tuntap", "add", "dev", _TAP, "mode", "tap"], check=True)
        subprocess.run(["ip", "link", "set", _TAP, "up"], check=True)
        self._groups = _machine_groups()
        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=_events, daemon=True).start()
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
        """The XML that libvirt holds for that container's VM, with plain QEMU, another name and other paths, and the network card
        that vmwrapper adds to it."""
        folder = f"{self._node.directory}/libvirt/etc/qemu"
        (name,) = [file for file in os.listdir(folder) if container[:12] in file and file.endswith(".xml")]
        root = etree.parse(f"{folder}/{name}").getroot()
        root = root if root.tag == "domain" else root.find("domain")
        for line in root.findall(f"{{{_QEMU_NS}}}commandline"):
            root.remove(line)
        root.find("devices").append(etree.fromstring(_NIC))
        root.find("name").text = "bare"
        root.find("uuid").text = str(uuid.uuid4())
        root.find("devices/emulator").text = "/usr/bin/qemu-system-x86_64"
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

    def remove(self) -> None:
        if self._domain is not None:
            if self._domain.isActive():
                self._domain.destroy()
            self._domain.undefine()
            self._domain = None


def _machine_groups() -> set[str]:
    return set(glob.glob("/sys/fs/cgroup/machine") + glob.glob("/sys/fs/cgroup/*/machine"))


def _events() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()
