"""The emulated machine on which the package is installed, built by ./machine. Its guest agent runs the commands."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
_BUILT = PROJECT / "build" / "install"
_MEMORY_MIB = 3072
# AppArmor is Debian's default. The check of timer interrupts counts while a processor spins that may not run meanwhile. Without
# virtualization of its own: it would be emulated, too, and a guest that tries it stands still.
_WORDS = (
    "modules_load=virtio_console root=/dev/vda ro console=ttyS0 mitigations=off audit=0 random.trust_cpu=on no_timer_check "
    "panic=-1 modprobe.blacklist=kvm_amd,kvm_intel "
    # The console then has the journal, too. It is all that a machine shows whose agent is silent.
    "systemd.journald.forward_to_console=1"
)
_DELIMITER = b"\xff"
# Seconds for one answer of the agent: while the machine boots, and while it works.
_ANSWER_BOOTING = 30.0
_ANSWER = 120.0
_LOOK = """
journalctl -b -n 150 --no-pager -o short-monotonic
journalctl -k -b --no-pager -o cat | grep DENIED
echo "--- jobs of systemd"; systemctl list-jobs --no-pager --full
echo "--- processes"; systemd-cgls --no-pager --full
echo "--- apt"; tail -n 40 /var/log/apt/term.log
"""


class Failed(Exception):
    """A command in the machine, or the machine itself, failed."""


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    output: str


class Machine:
    """`files` are on its second disk, which is mounted at /media."""

    def __init__(self, files: list[Path]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="virtshim-install-", dir="/var/tmp"))
        self.console = self.directory / "console"
        self._files = files
        self._agent: socket.socket | None = None
        self._unread = b""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(_BUILT / "root.qcow2"),
             str(self.directory / "root.qcow2")], check=True,
        )  # fmt: skip
        given = self.directory / "files"
        given.mkdir()
        for file in self._files:
            shutil.copy(file, given)
        size = sum(file.stat().st_size for file in given.iterdir()) // (1 << 20) + 32
        disk = self.directory / "files.ext4"
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(given), str(disk), f"{size}M"], check=True)
        self._process = subprocess.Popen(
            [
                # It never outlives the tests.
                "setpriv", "--pdeathsig", "KILL", "--",
                "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
                "-m", str(_MEMORY_MIB), "-nodefaults", "-no-user-config", "-display", "none",
                "-kernel", str(_BUILT / "vmlinuz"), "-initrd", str(_BUILT / "initrd"), "-append", _WORDS,
                "-drive", f"file={self.directory}/root.qcow2,if=virtio,format=qcow2,cache=unsafe",
                "-drive", f"file={disk},if=virtio,format=raw,readonly=on",
                "-serial", f"file:{self.console}", "-device", "virtio-serial", "-device", "virtio-rng-pci",
                "-chardev", f"socket,id=agent,path={self.directory}/agent.sock,server=on,wait=off",
                "-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._connect()

    def end(self) -> None:
        if self._agent is not None:
            self._agent.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
        shutil.rmtree(self.directory)

    def wait_for_boot(self, seconds: float, unlike: str = "") -> str:
        """Waits until systemd has started everything; returns the id of this boot, which differs from `unlike`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(Failed, OSError):
                self._synchronise()
                boot = self.run("cat /proc/sys/kernel/random/boot_id", until - time.monotonic()).output.strip()
                if boot != unlike:
                    self.run("systemctl is-system-running --wait", until - time.monotonic())
                    return boot
            time.sleep(1)
        raise Failed(f"did not boot within {seconds:.0f} s")

    def look(self) -> str:
        """What the machine shows of itself after a failure: journal, jobs, processes; its console if its agent is silent."""
        try:
            self._synchronise()
            return self.run(_LOOK, 120).output
        except (Failed, OSError) as exc:
            tail = self.console.read_text(errors="replace").splitlines()[-200:]
            return "\n".join((f"The machine's agent: {exc}. The machine's console:", *tail))

    def run(self, command: str, seconds: float) -> Done:
        """Runs a command as root, by bash; returns both output streams."""
        words = {"path": "/bin/bash", "arg": ["-c", f"exec 2>&1; {command}"], "capture-output": True}
        pid = self._ask("guest-exec", words)["pid"]
        until = time.monotonic() + seconds
        while True:
            said = self._ask("guest-exec-status", {"pid": pid})
            if said["exited"]:
                output = base64.b64decode(said.get("out-data", "")).decode(errors="replace")
                return Done(said.get("exitcode", 255), output)
            if time.monotonic() > until:
                raise Failed(f"not within {seconds:.0f} s: {command}")
            time.sleep(0.3)

    def ask_to_reboot(self) -> None:
        self._send("guest-exec", {"path": "/bin/systemctl", "arg": ["reboot"]})

    def _connect(self) -> None:
        """Connects once, before the machine boots, and for good: a port whose other end disconnects may stop working."""
        agent = socket.socket(socket.AF_UNIX)
        until = time.monotonic() + 30
        while True:
            try:
                agent.connect(f"{self.directory}/agent.sock")
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
            else:
                self._agent = agent
                return

    def _synchronise(self) -> None:
        """Discards answers to earlier requests."""
        assert self._agent is not None
        number = time.monotonic_ns() & 0xFFFFFFF
        self._agent.sendall(_DELIMITER)
        self._send("guest-sync-delimited", {"id": number})
        while self._answer(_ANSWER_BOOTING) != number:
            pass

    def _ask(self, name: str, arguments: dict[str, Any]) -> Any:
        self._send(name, arguments)
        said = self._answer(_ANSWER)
        if "error" in said:
            raise Failed(f"the guest agent says {said['error']}")
        return said

    def _send(self, name: str, arguments: dict[str, Any]) -> None:
        assert self._agent is not None
        self._agent.sendall(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")

    def _answer(self, seconds: float) -> Any:
        assert self._agent is not None
        self._agent.settimeout(seconds)
        while b"\n" not in self._unread:
            piece = self._agent.recv(1 << 16)
            if not piece:
                raise Failed("the machine has ended")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        said = json.loads(line.rpartition(_DELIMITER)[2])
        return said.get("return", said)


@contextlib.contextmanager
def booted(files: list[Path]) -> Iterator[Machine]:
    machine = Machine(files)
    try:
        machine.start()
        yield machine
    finally:
        machine.end()


def missing() -> str:
    """What this machine lacks to run it, "" if nothing."""
    return "" if (_BUILT / "inputs").exists() else f"needs {_BUILT}; run make e2e-install"
