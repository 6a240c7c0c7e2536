"""Whether a guest has come so far that there is something in it to shut down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from virtshim.domain.container import Container
from virtshim.ports.clock import Clock
from virtshim.ports.consoles import BootOutput
from virtshim.ports.hypervisor import VmReadings

# Nanoseconds. A guest that runs for longer may be one that writes to no disk and shows nothing.
_BOOTING: Final = 120 * 10**9


@dataclass(frozen=True, slots=True)
class BootProgress:
    readings: VmReadings
    console: BootOutput
    clock: Clock

    def is_before_kernel(self, container: Container) -> bool:
        """True if only firmware or a boot loader has run in it: it was started just now, its console shows no kernel, and it has
        written to none of its disks. Such a guest does not hear its power button, and has nothing to lose. False in doubt: also
        with devices of the host, whose state nobody sees here."""
        if container.status.command_begun or container.granted.passthrough:
            return False
        age = self.clock.now_ns() - container.status.started_at
        if abs(age) > _BOOTING or self.console.shows_kernel(container.id):
            return False
        usage = self.readings.usage({container.domain_uuid: container.domain_name}).get(container.domain_uuid)
        if usage is None or usage.counters is None or not usage.counters.blocks:
            return False
        return not any(block.writes for block in usage.counters.blocks)
