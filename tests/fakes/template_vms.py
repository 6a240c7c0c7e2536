"""VMs of templates, and of guests that come from them."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from fakes.hypervisor import FakeHypervisor

from virtshim.model.errors import NotFound, ShimError
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.model.layout import Layout
from virtshim.model.vm import Power, PowerState, VmSpec
from virtshim.templates.files import TemplateFileStore
from virtshim.templates.values import Template
from virtshim.vm import domain_xml
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.ownership import OwnerMark
from virtshim.vm.xml_text import parsed

PROFILE = NodeProfile("node-1", DomainType.KVM, "/usr/lib/virtshim/vmwrapper", "/usr/bin/qemu", Cgroups.V2)
# The beginning of a qcow2 file whose guest sees a GiB.
HEAD = b"QFI\xfb".ljust(24, b"\0") + (1 << 30).to_bytes(8, "big") + bytes(72)


class FakeTemplateVms:
    """Implements `virtshim.templates.ports.TemplateVms`. `error`: of each start. `version`: of QEMU."""

    def __init__(self, vms: FakeHypervisor) -> None:
        self._vms = vms
        self._like: VmSpec | None = None
        self.version = "7.2"
        # Where the layout has the directories of containers: root disks that are fakes are elsewhere.
        self.containers = "/containers"
        self.error: ShimError | None = None
        self.on_boot: Callable[[], None] = lambda: None
        # Those that were ever booted.
        self.templates: list[uuid.UUID] = []

    def qemu(self) -> str:
        return self.version

    def definition(self, domain: uuid.UUID, container: ContainerId) -> str:
        spec = self._vms.domains[domain].spec
        assert spec is not None
        self._like = spec
        return domain_xml.build(spec, PROFILE).replace('"/containers/', f'"{self.containers}/')

    def define(self, definition: str, disk: str) -> None:
        assert self._like is not None, "a template has the machine of a container"
        found = parsed(definition)
        owner = next(found.iter("{https://virtshim.io/domain/1}owner"))
        mark = OwnerMark(PROFILE.node, ContainerId(owner.get("container", "")), SandboxId(owner.get("sandbox", "")))
        self._vms.define(
            dataclasses.replace(
                self._like,
                uuid=uuid.UUID(found.findtext("uuid", "")),
                name=found.findtext("name", ""),
                container_id=mark.container_id,
                sandbox_id=mark.sandbox_id,
                fetch_key="",
            )
        )

    def boot(self, domain: uuid.UUID, container: ContainerId, memory: int) -> None:
        self.on_boot()
        if self.error is not None:
            raise self.error
        self.templates.append(domain)
        self._vms.start(domain, container)
        os.pwrite(memory, b"a guest that has booted", 0)

    def await_devices(self, domain: uuid.UUID, container: ContainerId, memory: int) -> None:
        if self.error is not None:
            raise self.error
        there = self._vms.domains.get(domain)
        if there is None:
            raise NotFound(f"no VM {domain}")
        self._vms.awaiting.add(domain)
        there.state = PowerState(Power.PAUSED)
        self._vms.use_network(domain)


class TemplateFilesBesideFakes(TemplateFileStore):
    """The real files, beside root disks that are fakes: one is there as soon as it is looked for."""

    def __init__(self, layout: Layout, directory: str) -> None:
        super().__init__(Layout(layout.state_dir, f"{directory}/run"))

    def open_disk(self, container: ContainerId) -> tuple[int, int]:
        self._make(container)
        return super().open_disk(container)

    def put_disk(self, container: ContainerId, template: Template) -> None:
        self._make(container)
        super().put_disk(container, template)

    def _make(self, container: ContainerId) -> None:
        path = Path(self._layout.root_disk(container))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(HEAD)
