"""What of a VM's hardware the node brings: asked for each new one, as packages and CPUs come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from virtshim.domain.hardware.numa import HostNodes
from virtshim.domain.hardware.options import Firmware, FirmwareFiles


@dataclass(frozen=True, slots=True)
class NodeHardware:
    # The machine type of a new VM, with its version; "" while it is not known.
    machine_type: Callable[[], str]
    # None if libvirt is to choose it at each start.
    firmware_of: Callable[[Firmware], FirmwareFiles | None]
    host_nodes: Callable[[], HostNodes]
