"""A node as installed, on the system's libvirtd, which dies on order as the node's daemons do."""

from __future__ import annotations

from dying import Killer
from mortal_node import MortalNode
from own_libvirtd import OwnLibvirtd
from podclient import wait_until


class LibvirtdNode(MortalNode):
    def __init__(self, directory: str, image_url: str, *, settings: str = "") -> None:
        """`settings`: more of [libvirt]."""
        self.libvirtd = OwnLibvirtd()
        super().__init__(
            directory, image_url, settings=f'[libvirt]\nuri = "qemu:///system"\n{settings}', enter=self.libvirtd.enter
        )
        self.killers["libvirtd"] = Killer(f"{directory}/libvirtd.order")
        self.environment["virtshim"] = {
            "VIRTSHIM_TEST_ORDER": self.killers["libvirtd"].order,
            "VIRTSHIM_TEST_VICTIM": self.libvirtd.pid_file,
        }

    def _command(self, name: str) -> tuple[str, ...]:
        words = super()._command(name)
        if name != "virtshim":
            return words
        return *self.libvirtd.enter, *(word.replace("dying_virtshim.py", "dying_libvirtd.py") for word in words)

    def up(self) -> None:
        if not self.libvirtd.is_running:
            self.libvirtd.start()
        super().up()

    def kill(self, name: str) -> None:
        if name == "libvirtd":
            self.libvirtd.kill()
        else:
            super().kill(name)

    def died(self, name: str, within: float) -> bool:
        if name != "libvirtd":
            return super().died(name, within)
        try:
            wait_until(lambda: not self.libvirtd.is_running, within, "libvirtd has died")
        except TimeoutError:
            return False
        return True

    def left(self) -> set[str]:
        return super().left() | {f"VM {name}" for name in self.libvirtd.domains()}

    def end(self) -> None:
        super().end()
        assert self.libvirtd.domains() == set()
        self.libvirtd.end()
