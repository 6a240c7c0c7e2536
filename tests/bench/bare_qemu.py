"""Starts QEMU by hand, without libvirt and cloud-init, on an image with one disk, one network card and a serial
console. QEMU's own network answers DHCP at once."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from bare import ask, connected


def boot_ms(image: Path, memory: int, word: bytes) -> float:
    """Milliseconds from the start of the guest's CPUs until `word` is on the console. `memory`: bytes."""
    with _booting(image, memory) as directory:
        return said_ms(f"{directory}/console", word, time.monotonic())


@contextlib.contextmanager
def _booting(image: Path, memory: int, *, agent: bool = False) -> Iterator[str]:
    """QEMU's directory, with the file `console`, and with `agent` the socket of the guest's agent. The CPUs have just
    started."""
    with tempfile.TemporaryDirectory(prefix="bare-qemu-", dir="/var/tmp") as directory:
        disk, console, monitor = (f"{directory}/{name}" for name in ("disk", "console", "monitor"))
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", disk], check=True)
        argv = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg", "-cpu", "max", "-m", f"{memory >> 20}",
                "-display", "none", "-nodefaults", "-no-user-config", "-S", "-qmp", f"unix:{monitor},server,nowait",
                "-drive", f"file={disk},format=qcow2,if=virtio", "-serial", f"file:{console}",
                "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]  # fmt: skip
        if agent:
            argv += ["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
                     "-chardev", f"socket,id=agent,path={directory}/agent,server=on,wait=off"]  # fmt: skip
        process = subprocess.Popen(argv)
        try:
            with connected(monitor, process) as file:
                ask(file, "cont")
                yield directory
        finally:
            process.kill()
            process.wait()


class BareAgent:
    """The agent of a guest in a bare QEMU, asked without virtshim."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rwb")

    @classmethod
    @contextlib.contextmanager
    def of(cls, image: Path, memory: int) -> Iterator[Self]:
        """The agent answers."""
        with _booting(image, memory, agent=True) as directory, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(300)
            connection.connect(f"{directory}/agent")
            agent = cls(connection)
            agent._ask("guest-ping")
            yield agent

    def true_ms(self) -> float:
        """Milliseconds to run `true`, until the agent says that it has ended."""
        started = time.monotonic()
        process = self._ask("guest-exec", path="/bin/true")
        while not self._ask("guest-exec-status", **process)["exited"]:
            pass
        return (time.monotonic() - started) * 1000

    def _ask(self, command: str, **arguments: Any) -> Any:
        self._file.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        self._file.flush()
        return json.loads(self._file.readline())["return"]


def said_ms(console: str, word: bytes, started: float) -> float:
    """Until `word` is in the console's log."""
    while word not in Path(console).read_bytes():
        if time.monotonic() - started > 300:
            raise TimeoutError(f"the guest did not say {word.decode()!r}")
        time.sleep(0.005)
    return (time.monotonic() - started) * 1000
