"""The consoles' output during the guests' boot, chosen by the test."""

from __future__ import annotations

from virtshim.model.ids import ContainerId


class FakeBootOutput:
    """Implements `virtshim.logs.ports.BootOutput`. Guests in `before_kernel` have shown no kernel yet."""

    def __init__(self) -> None:
        self.before_kernel: set[ContainerId] = set()
        self.shown: dict[ContainerId, bytes] = {}

    def shows_kernel(self, container: ContainerId) -> bool:
        return container not in self.before_kernel

    def piece(self, container: ContainerId, start: int, most: int) -> bytes:
        return self.shown.get(container, b"")[start : start + most]
