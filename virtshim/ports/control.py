"""What an operator does with a VM by hand."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Protocol

from virtshim.domain.ids import ContainerId


class VmControl(Protocol):
    """Errors: as `virtshim.ports.hypervisor.Hypervisor`."""

    def reset(self, domain: uuid.UUID) -> None:
        """The reset button. WrongState if it is off."""

    def definition(self, domain: uuid.UUID) -> str:
        """libvirt's XML of it as it is now, without what opens the pod's network."""

    def on_agent(self, callback: Callable[[uuid.UUID], None]) -> None:
        """`callback` is called, from a thread of its own, when a guest's agent has answered on a new connection."""


class Screenshots(Protocol):
    """VMs' screens as they are now."""

    def take(self, container: ContainerId, timeout: float) -> bytes:
        """A PNG file. Errors: Unavailable (no such screen, or it does not answer), DeadlineExceeded, InternalError."""
