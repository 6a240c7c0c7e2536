"""Starts a container's guest from a template (virtshim.io/warm-start), or lets it boot.

QEMU maps the template's memory so that the guest's writes stay private, and loads the state of the template's devices. Then the
guest agent gives the guest an identity of its own (`guest_identity`). The container is started after that; until then, nothing of
the pod is in the guest. If a step fails, the guest boots from its own disk instead, within the same call.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.containers.logs import ContainerLogs
from virtshim.guest.ports import GuestAgents, GuestOperations
from virtshim.metrics import observed
from virtshim.metrics.observed import WarmStart, WarmStarted
from virtshim.model.container import Container
from virtshim.model.errors import Aborted, InternalError, ShimError, WrongState
from virtshim.model.network import nics_of
from virtshim.model.sandbox import Sandbox
from virtshim.store.ports import StateRecords
from virtshim.system.clock import Clock
from virtshim.templates.guest_identity import BECOME, identity_arguments, new_time_and_seed
from virtshim.templates.keeping import Templates, image_of
from virtshim.templates.ports import TemplateFiles, TemplateVms
from virtshim.templates.values import Cold, Template, why_cold
from virtshim.vm.ports import Hypervisor, MemoryStreams, VmPausing
from virtshim.vm.streams import wait_for_stream

log = structlog.get_logger(__name__)

# Seconds for all of a start from a template. A start that takes longer than the boot that it saves is of no use; a busy node gets
# a little more.
_LEAST_PATIENCE: Final = 10.0
_MOST_PATIENCE: Final = 60.0
# Of these, for QEMU to load the devices.
_LOADED: Final = 10.0
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
        self,
        container: Container,
        sandbox: Sandbox,
        boot: Callable[[Container], Container],
        again: Callable[[], None],
        leave_off: threading.Event,
    ) -> Container:
        """Returns the container as RUNNING. `boot` starts it as if there were no templates. `again` prepares a second start: the
        pod's network is open for one. `leave_off`: set when a call waits to end the VM. The start then fails, unless the guest
        has its own identity already."""
        self.files.take_back(container.id)  # of an attempt that was killed
        if (cold := self._from_template(container, sandbox, again, leave_off)) is None:
            observed.meter().tell(WarmStarted(WarmStart.WARM))
            return container.with_warm_start(begun=True).running(self.clock.now_ns())
        observed.meter().tell(WarmStarted(cold.how))
        log.info("container.started_cold", container=container.id.short, why=cold.why)
        with contextlib.suppress(ShimError):
            self.logs.note(container, f"virtshim: the guest boots, although virtshim.io/warm-start is set: {cold.why}")
        return boot(container.with_warm_start(begun=False))

    def is_half_made(self, container: Container) -> bool:
        """Whether a killed virtshim left the guest without an identity of its own. The container is CREATED in its record. Its VM
        must not run."""
        return container.status.warm_started and self.files.has_own_disk_aside(container.id)

    def _from_template(
        self, container: Container, sandbox: Sandbox, again: Callable[[], None], leave_off: threading.Event
    ) -> Cold | None:
        """None if its guest runs, else why it must boot; then its VM is off, with its own disk. Raises ShimError if that cannot
        be."""
        if not self.templates.most.now:
            return Cold(WarmStart.NOT_ALLOWED, "this node does not allow it (templates.max_bytes)")
        if why := why_cold(container):
            return Cold(WarmStart.UNSUITABLE, why)
        try:
            return self._try(container, sandbox, leave_off)
        except (ShimError, OSError) as exc:  # OSError: this process has no free descriptor
            self.agents.forget(container.id)
            self.hypervisor.destroy(container.domain_uuid, container.id)
            self.files.take_back(container.id)
            if leave_off.is_set():
                raise
            again()
            return Cold(WarmStart.FAILED, str(exc))

    def _try(self, container: Container, sandbox: Sandbox, leave_off: threading.Event) -> Cold | None:
        disk, size = self.files.open_disk(container.id)
        with os.fdopen(disk, "rb"):
            try:
                key, definition = self.templates.key_for(container, size)
            except WrongState as exc:
                return Cold(WarmStart.UNSUITABLE, str(exc))
            with self.templates.of(key) as template:
                if template is None:
                    return self.templates.want(key, definition, container, disk)
                try:
                    self._continue(container, sandbox, template, leave_off)
                except Exception as exc:
                    if not leave_off.is_set():
                        why = f"a guest could not start from its template: {exc}"
                        self.templates.note_unfit(key, image_of(container), why, _AGAIN)
                    raise
        return None

    def _continue(self, container: Container, sandbox: Sandbox, template: Template, leave_off: threading.Event) -> None:
        domain, own = container.domain_uuid, container.id
        began = self.clock.monotonic()
        until = began + min(max(template.booted_in, _LEAST_PATIENCE), _MOST_PATIENCE)
        # A power cut also ends the VM, so only the next process needs this row.
        self.records.containers.replace(container.with_warm_start(begun=True), survives_power_cuts=False)
        self.files.put_disk(own, template)
        self.vms.await_devices(domain, own, template.memory)
        waits = self.clock.monotonic()
        self.streams.leave_memory_out(domain, own, left_out=True)
        self._load(container, template, leave_off)
        self.agents.connect(own)
        self.pausing.resume(domain, own)
        runs = self.clock.monotonic()
        self.streams.leave_memory_out(domain, own, left_out=False)  # it is to be saved with its memory
        self._become(container, sandbox, max(0.0, until - runs), leave_off)
        self.files.keep_disk(own)
        log.info(
            "container.started_warm",
            container=own.short,
            qemu_ms=_ms(began, waits),
            devices_ms=_ms(waits, runs),
            guest_ms=_ms(runs, self.clock.monotonic()),
        )

    def _load(self, container: Container, template: Template, leave_off: threading.Event) -> None:
        def check() -> None:
            if leave_off.is_set():
                raise Aborted("the caller gave up")

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
            check=check,
        )

    def _become(self, container: Container, sandbox: Sandbox, seconds: float, leave_off: threading.Event) -> None:
        hostname = sandbox.config.hostname or sandbox.key.name
        arguments = identity_arguments(hostname, secrets.token_hex(16), nics_of(sandbox.network, container.granted))
        fresh = new_time_and_seed(self.clock.now_ns())
        code, said = self.guests.run_script(container.id, BECOME, arguments, fresh, seconds, leave_off)
        if code:
            raise InternalError(
                f"the guest could not get an identity of its own: {said or f'the script ended with {code}'}"
            )


def _ms(began: float, ended: float) -> float:
    return round((ended - began) * 1000, 1)
