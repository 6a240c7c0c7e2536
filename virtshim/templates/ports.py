"""Ports to templates: their VMs, and their files."""

from __future__ import annotations

import uuid
from typing import Protocol

from virtshim.model.ids import ContainerId
from virtshim.templates.values import Template


class TemplateVms(Protocol):
    """VMs that boot on memory with a file behind it, and VMs that continue from there. Errors: as `virtshim.vm.ports.Hypervisor`.
    `memory`: the file's descriptor."""

    def qemu(self) -> str:
        """Tells the node's QEMU from another version or build."""

    def definition(self, domain: uuid.UUID, container: ContainerId) -> str:
        """The definition that the container's VM would be started with."""

    def define(self, definition: str, disk: str) -> None:
        """Defines a template. `disk`: the path of its root disk, which its QEMU may then use."""

    def boot(self, domain: uuid.UUID, container: ContainerId, memory: int) -> None:
        """Starts a defined template. Its guest writes into the file."""

    def await_devices(self, domain: uuid.UUID, container: ContainerId, memory: int) -> None:
        """Starts a VM that is defined and off. What its guest writes is its own. Returns when QEMU waits for the state of its
        devices; the VM is paused."""


class TemplateFiles(Protocol):
    """Files of templates, and the root disks of guests that start from them. A finished template's files have no names, so
    nothing of it outlives the process. Errors: InternalError, ResourceExhausted."""

    def begin(self, template: ContainerId, disk: int) -> str:
        """Makes the directories of a template that is about to boot. Its root disk is a copy of the file `disk`; returns its
        path."""

    def memory(self, size: int) -> int:
        """Empty memory of that size, for a guest to boot on. The caller closes it."""

    def devices(self) -> int:
        """An empty file for the state of devices. The caller closes it."""

    def seal(self, template: ContainerId, memory: int, devices: int) -> Template:
        """What is left of a template whose VM has ended. From now on nobody can write to `memory`; Unavailable while somebody
        still may. The caller owns all descriptors."""

    def remove(self, template: ContainerId) -> None:
        """Removes the template's directories. No error if they are gone."""

    def remove_leftovers(self) -> None:
        """Removes what an earlier process was making."""

    def open_disk(self, container: ContainerId) -> tuple[int, int]:
        """The container's own root disk, which no guest has used: its descriptor, and the size that the guest sees. The caller
        closes it."""

    def put_disk(self, container: ContainerId, template: Template) -> None:
        """Gives the container a copy of the template's root disk. Its own is kept until `keep_disk` or `take_back`."""

    def has_own_disk_aside(self, container: ContainerId) -> bool:
        """Whether `put_disk` has begun, and neither `keep_disk` nor `take_back` has ended that."""

    def take_back(self, container: ContainerId) -> bool:
        """The container has its own root disk again. False if it had it. Repeatable after a crash at any step."""

    def keep_disk(self, container: ContainerId) -> None:
        """The container keeps the copy for good."""
