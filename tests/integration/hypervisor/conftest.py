"""A guest of 512 bytes that answers on its serial port, and a process with an embedded libvirt."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from podclient import wait_until

QEMU = "/usr/bin/qemu-system-x86_64"

# A boot sector: prints "guest is up" on COM1, then echoes what it reads there. q: ACPI power off (q35's PM1a control
# register, set by SeaBIOS); p: panic (pvpanic); r: reset (keyboard controller).
#
#         cli; xor ax, ax; mov ds, ax; cld; mov si, msg; mov dx, 0x3f8
# say:    lodsb; test al, al; jz listen; out dx, al; jmp say
# listen: mov dx, 0x3fd; in al, dx; test al, 1; jz listen; mov dx, 0x3f8; in al, dx; out dx, al
#         cmp al, 'q'; je off; cmp al, 'p'; je panic; cmp al, 'r'; je reset; jmp listen
# off:    mov dx, 0x604; mov ax, 0x2000; out dx, ax; jmp listen
# panic:  mov dx, 0x505; mov al, 1; out dx, al; jmp listen
# reset:  mov al, 0xfe; out 0x64, al; jmp listen
# msg:    "guest is up\n", 0
_CODE = bytes.fromhex(
    "fa31c08ed8fcbe467cbaf803ac84c07403eeebf8bafd03eca80174f8baf803ecee3c71740a3c70740f3c727413ebe5"
    "ba0406b80020efebdcba0505b001eeebd4b0fee664ebce67756573742069732075700a00"
)


@dataclass
class Place:
    """The directory of one VM and its libvirt."""

    directory: Path

    @property
    def root(self) -> Path:
        return self.directory / "l"

    @property
    def vm(self) -> Path:
        return self.directory / "vm"

    @property
    def sockets(self) -> Path:
        return self.directory / "s"

    @property
    def console(self) -> str:
        return str(self.sockets / "console.sock")

    @property
    def log(self) -> Path:
        return self.vm / "console.log"

    def run(self, script: str, *options: str, expect: int = 0, timeout: float = 120) -> list[object]:
        """Runs Python with `place_hypervisor` ready in its own process, because a process can have only one embedded
        libvirt; returns the values that it passed to `say`."""
        source = (Path(__file__).parent / "embedded_process.py").read_text() + script
        done = subprocess.run(
            [sys.executable, "-c", source, str(self.directory), *options],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == expect, f"ended with {done.returncode}: {done.stderr[-3000:]}"
        return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")]

    def end_vms(self) -> None:
        """Ends the programs of VMs that still run: they outlive the process that started them."""
        left = [directory for directory in Path("/proc").glob("[0-9]*") if self._is_of_a_vm(directory)]
        for directory in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(directory.name), signal.SIGKILL)
        for directory in left:
            wait_until(lambda gone=directory: not self._is_of_a_vm(gone), 30, "a VM's program has ended")

    def _is_of_a_vm(self, process: Path) -> bool:
        try:
            return os.fsencode(self.directory) in (process / "cmdline").read_bytes()
        except OSError:  # it has ended
            return False


@pytest.fixture(scope="session")
def known_of_qemu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libvirt's cached probe of QEMU, kept from test to test because it takes a second or more."""
    return tmp_path_factory.mktemp("libvirt") / "cache"


@pytest.fixture
def place(known_of_qemu: Path) -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("AREA guest NOT TESTED: needs root")
    if not os.path.exists(QEMU):
        pytest.skip(f"AREA guest NOT TESTED: needs {QEMU}; run make setup")
    with tempfile.TemporaryDirectory(prefix="hv-", dir="/var/tmp") as name:
        place = Place(Path(name))
        place.directory.chmod(0o711)
        place.vm.mkdir()
        place.vm.chmod(0o711)
        place.sockets.mkdir(0o700)
        image = place.vm / "base.raw"
        image.write_bytes(_CODE.ljust(510, b"\0") + b"\x55\xaa" + bytes((1 << 20) - 512))
        image.chmod(0o444)
        disk = place.vm / "root.qcow2"
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(image), "-F", "raw", str(disk)], check=True
        )
        disk.chmod(0o600)
        (place.vm / "seed.iso").write_bytes(bytes(1 << 16))
        (place.vm / "seed.iso").chmod(0o600)
        if known_of_qemu.exists():
            shutil.copytree(known_of_qemu, place.root / "cache")
        yield place
        place.end_vms()
        if not known_of_qemu.exists() and (place.root / "cache").exists():
            shutil.copytree(place.root / "cache", known_of_qemu)
