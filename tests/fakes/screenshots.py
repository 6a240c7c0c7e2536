"""VMs' screens: a picture of one pixel."""

from __future__ import annotations

from virtshim.attach.screen import png_encoded
from virtshim.model.errors import Unavailable
from virtshim.model.ids import ContainerId


class FakeScreenshots:
    """Implements `virtshim.vm.ports.Screenshots`. `gone`: QEMU has ended."""

    def __init__(self) -> None:
        self.gone = False

    def take(self, container: ContainerId, timeout: float) -> bytes:
        if self.gone:
            raise Unavailable("the VM has ended")
        return png_encoded(1, 1, b"\x01\x02\x03")
