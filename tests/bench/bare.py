"""The bare counterpart: the same domain XML on plain QEMU, started by libvirt alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import uuid
from types import TracebackType
from typing import Self

import libvirt
from lxml import etree
from node import Node

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
        shutil.copy(f"{self._node.directory}/libvirt/etc/qemu.conf", f"{self._directory}/etc/qemu.conf")
        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=_events, daemon=True).start()
        self._connection = libvirt.open(f"qemu:///embed?root={self._directory}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self.remove()
        self._connection.close()

    def define_like(self, container: str) -> None:
        """The XML that libvirt holds for that container's VM, with plain QEMU, another name and other paths."""
        folder = f"{self._node.directory}/libvirt/etc/qemu"
        (name,) = [file for file in os.listdir(folder) if container[:12] in file and file.endswith(".xml")]
        root = etree.parse(f"{folder}/{name}").getroot()
        root = root if root.tag == "domain" else root.find("domain")
        for line in root.findall(f"{{{_QEMU_NS}}}commandline"):
            root.remove(line)
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


def _events() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()
