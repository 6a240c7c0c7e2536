"""What a console shows of how far its guest has booted. Implements `virtshim.ports.consoles.BootOutput`."""

from __future__ import annotations

import re
from typing import Final

from virtshim.domain.ids import ContainerId
from virtshim.domain.layout import Layout

# Firmware and boot loaders write a few KiB at most; more than this, and something else runs.
_LONGEST: Final = 64 << 10

# A kernel's first words, with or without a time: Linux's own and its EFI stub's, the BSDs'. The guest writes what is searched:
# no part may repeat without a bound.
_KERNEL: Final = re.compile(
    rb"Linux version |^\[ *\d+\.\d{6}\]|EFI stub|Copyright \(c\) \d{4}-\d{4} The [^\n]{0,100}?BSD", re.MULTILINE
)


class RawBootOutput:
    """Reads QEMU's own file, which is there from the VM's start."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def shows_kernel(self, container: ContainerId) -> bool:
        try:
            with open(self._layout.console_log(container), "rb") as file:
                beginning = file.read(_LONGEST)
        except OSError:
            return True
        return len(beginning) == _LONGEST or _KERNEL.search(beginning) is not None

    def piece(self, container: ContainerId, start: int, most: int) -> bytes:
        try:
            with open(self._layout.console_log(container), "rb") as file:
                file.seek(start)
                return file.read(most)
        except OSError:
            return b""
