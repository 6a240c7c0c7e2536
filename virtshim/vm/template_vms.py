"""VMs of templates, by libvirt. Implements `virtshim.templates.ports.TemplateVms`."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.model.image import DiskFormat
from virtshim.model.layout import Layout
from virtshim.model.vm import Disk
from virtshim.vm.driver import LibvirtHypervisor


@dataclass(frozen=True, slots=True)
class LibvirtTemplateVms:
    """`emulator`: the path of the QEMU that vmwrapper starts."""

    hypervisor: LibvirtHypervisor
    layout: Layout
    emulator: str

    def qemu(self) -> str:
        try:
            found = os.stat(self.emulator)
        except OSError as exc:
            raise InternalError(f"{self.emulator}: {exc.strerror}; correct libvirt.emulator") from exc
        return f"{self.emulator} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"

    def definition(self, domain: uuid.UUID, container: ContainerId) -> str:
        return self.hypervisor.own_definition(domain, container)

    def define(self, definition: str, disk: str) -> None:
        self.hypervisor.define_template(definition, Disk(disk, DiskFormat.QCOW2, ""))

    def boot(self, domain: uuid.UUID, container: ContainerId, memory: int) -> None:
        self._start(domain, container, memory, shared=True)

    def await_devices(self, domain: uuid.UUID, container: ContainerId, memory: int) -> None:
        self._start(domain, container, memory, shared=False)

    def _start(self, domain: uuid.UUID, container: ContainerId, memory: int, *, shared: bool) -> None:
        socket = self.layout.memory_socket(container)
        self.hypervisor.start_on_memory(domain, container, memory, socket, shared=shared)
