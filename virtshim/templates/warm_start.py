"""Starts a container's guest from a template (virtshim.io/warm-start), or lets it boot.

QEMU maps the template's memory so that what the guest writes is its own, and loads the state of the template's devices. Then the
guest agent makes it a guest of its own (`guest_identity`). Only then is the container started: before, nothing of the pod is in
the guest. If anything of this fails, the guest boots from its own disk instead, within the same call.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.containers.logs import ContainerLogs
from virtshim.guest.ports import GuestAgents, GuestOperations
from virtshim.model.container import Container
from virtshim.model.errors import InternalError, ShimError
from virtshim.model.network import nics_of
from virtshim.model.sandbox import Sandbox
from virtshim.store.ports import StateRecords
from virtshim.system.clock import Clock
from virtshim.templates.guest_identity import BECOME, identity_arguments, new_time_and_seed
from virtshim.templates.keeping import Templates
from virtshim.templates.ports import TemplateFiles, TemplateVms
from virtshim.templates.values import Template, why_cold
from virtshim.vm.ports import Hypervisor, MemoryStreams, VmPausing
from virtshim.vm.streams import wait_for_stream

log = structlog.get_logger(__name__)

# Seconds for QEMU to load the devices.
_LOADED: Final = 10.0
# Seconds for the guest to become one of its own.
_BECOMES: Final = 60.0
# Seconds without this template after a start from it has failed.
_AGAIN: Final = 600.0


@dataclass(frozen=True, slots=True)
class WarmStarts:
    templates: Templates
    vms: TemplateVms
    files: TemplateFiles
    hypervisor: Hypervisor
    pausing: VmPausing
    streams: MemoryStreams
    guests: GuestOperations
    agents: GuestAgents
    records: StateRecords
    logs: ContainerLogs
    clock: Clock

    def start(
        self, container: Container, sandbox: Sandbox, boot: Callable[[Container], Container], again: Callable[[], None]
    ) -> Container:
        """Returns the container as RUNNING. `boot` starts it as if there were no templates. `again` prepares a second start: the
        pod's network is open for one."""
        self.files.take_back(container.id)  # of an attempt that was killed
        if not self.templates.most.now:
            why = "this node does not allow it (templates.max_bytes)"
        elif not (why := why_cold(container)):
            try:
                if (why := self._from_template(container, sandbox)) == "":
                    return container.with_warm_start(begun=True).running(self.clock.now_ns())
            except ShimError as exc:
                why = str(exc)
                again()
        log.info("container.started_cold", container=container.id.short, why=why)
        with contextlib.suppress(ShimError):
            self.logs.note(container, f"virtshim: the guest boots, although virtshim.io/warm-start is set: {why}")
        return boot(container.with_warm_start(begun=False))

    def is_half_made(self, container: Container) -> bool:
        """Whether the guest of a container that is CREATED in its record is not yet one of its own, because virtshim was killed.
        Its VM must not run."""
        return container.status.warm_started and self.files.has_own_disk_aside(container.id)

    def _from_template(self, container: Container, sandbox: Sandbox) -> str:
        """Why it must boot, "" if its guest runs. Raises ShimError; then its VM is off, with its own disk."""
        disk, size = self.files.open_disk(container.id)
        with os.fdopen(disk, "rb"):
            key, definition = self.templates.key_for(container, size)
            with self.templates.of(key) as template:
                if template is None:
                    return self.templates.want(key, definition, container.id, disk)
                try:
                    self._continue(container, sandbox, template)
                except Exception as exc:
                    self.agents.forget(container.id)
                    self.hypervisor.destroy(container.domain_uuid, container.id)
                    self.files.take_back(container.id)
                    self.templates.unfit(key, f"a guest could not be made of its template: {exc}", _AGAIN)
                    raise
        return ""

    def _continue(self, container: Container, sandbox: Sandbox, template: Template) -> None:
        domain, own = container.domain_uuid, container.id
        self.records.containers.replace(container.with_warm_start(begun=True))
        self.files.put_disk(own, template)
        self.vms.await_devices(domain, own, template.memory)
        self.streams.leave_memory_out(domain, own, left_out=True)
        self._load(container, template)
        self.streams.leave_memory_out(domain, own, left_out=False)  # it is to be saved with its memory
        self.pausing.resume(domain, own)
        self._become(container, sandbox)
        self.files.keep_disk(own)

    def _load(self, container: Container, template: Template) -> None:
        # From the beginning, whoever else reads the file.
        devices = os.open(f"/proc/self/fd/{template.devices}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.streams.receive(container.domain_uuid, container.id, devices)
        finally:
            os.close(devices)
        wait_for_stream(
            lambda: self.streams.state(container.domain_uuid, container.id),
            self.clock,
            _LOADED,
            "QEMU did not load the template's devices",
        )

    def _become(self, container: Container, sandbox: Sandbox) -> None:
        hostname = sandbox.config.hostname or sandbox.key.name
        arguments = identity_arguments(hostname, secrets.token_hex(16), nics_of(sandbox.network, container.granted))
        fresh = new_time_and_seed(self.clock.now_ns())
        code, said = self.guests.run_script(container.id, BECOME, arguments, fresh, _BECOMES)
        if code:
            raise InternalError(
                f"the guest could not be made one of its own: {said or f'the script ended with {code}'}"
            )
