"""VMs' screens: a picture of one pixel."""

from __future__ import annotations

from virtshim.attach import png
from virtshim.domain.errors import Unavailable
from virtshim.domain.ids import ContainerId


class FakeScreenshots:
    """Implements `virtshim.ports.control.Screenshots`. `gone`: QEMU has ended."""

    def __init__(self) -> None:
        self.gone = False

    def take(self, container: ContainerId, timeout: float) -> bytes:
        if self.gone:
            raise Unavailable("the VM has ended")
        return png.encoded(1, 1, b"\x01\x02\x03")
