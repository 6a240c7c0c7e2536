"""Decides `libvirt.domain_type = "auto"`: boots a probe guest to see whether this node's VMs can run under KVM.

A /dev/kvm that opens and makes VMs proves nothing: under some KVMs (paravirtual ones inside a VM) a BIOS runs but no
kernel does. So a tiny guest does what kernels do first, with the CPU model that VMs will get.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import structlog

from virtshim.model.errors import DeadlineExceeded, ShimError
from virtshim.system.files import replace_text
from virtshim.system.machine import boot_id
from virtshim.system.process import Finished, run
from virtshim.vm.elements.processors import DomainType

# QEMU's exit code if the guest succeeded.
PROBE_GUEST_PASSED: Final = 99

_SIZE: Final = 0x10000
_RESET_VECTOR: Final = 0xFFF0
_JUMP_TO_START: Final = bytes.fromhex("ea000000f0")
_CODE: Final = bytes.fromhex(
    "fafc31c08ed88ec08ed0bc007cbaf803b050eebf00106631c0b9000c66f3abc70600100320c70600200330c706003083"
    "0066b8001000000f22d80f20e0660d200600000f22e066b9800000c00f32660d000100000f302e660f0116c8000f20c0"
    "660d030000806683e0fb0f22c066ea75000f000800b8100000008ed88ed0bc007c0000baf8030000b04cee54f30f7e04"
    "24660fd4c031c00fa2b9002d3101ffc975fcb031e6f4f4ebfd8db400008d74000000000000000000ffff0000009aaf00"
    "ffff00000092cf001700b0000f"
)


def probe_guest_rom() -> bytes:
    """The 64 KiB for QEMU's `-bios`, assembled from `probe_guest.S`."""
    start = _CODE.ljust(_RESET_VECTOR, b"\0") + _JUMP_TO_START
    return start.ljust(_SIZE, b"\0")


log = structlog.get_logger(__name__)

# A real KVM takes 0.1 s, and longer while the node boots.
_LIMIT: Final = 10.0

_KVM: Final = "/dev/kvm"


class RunProgram(Protocol):
    """As `virtshim.system.process.run`."""

    def __call__(self, argv: list[str], *, timeout: float) -> Finished: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why` is for people; `final`: a later probe in this boot would have the same result."""

    domain_type: DomainType
    why: str
    final: bool = True


def probe_choose(
    wanted: Literal["auto", "kvm", "qemu"],
    qemu: str,
    remembered: str,
    *,
    run_program: RunProgram = run,
    kvm: str = _KVM,
) -> Verdict:
    """Chooses the domain type. `auto` probes once per boot and keeps the verdict in the file `remembered`."""
    if wanted != "auto":
        return Verdict(DomainType(wanted), f"set by libvirt.domain_type = {wanted!r}")
    if not os.path.exists(kvm):
        return Verdict(DomainType.QEMU, f"there is no {kvm}: VMs run without hardware acceleration")
    key = _key(qemu)
    if (known := _recall(remembered, key)) is not None:
        return known
    verdict = probe(qemu, run_program=run_program)
    report = log.info if verdict.domain_type is DomainType.KVM else log.warning
    report("kvm.probed", domain_type=verdict.domain_type.value, why=verdict.why)
    if verdict.final:
        _remember(remembered, key, verdict)
    return verdict


def probe(qemu: str, *, run_program: RunProgram = run) -> Verdict:
    """Boots the probe guest under KVM."""
    with tempfile.NamedTemporaryFile(prefix="virtshim-probe-") as rom:
        rom.write(probe_guest_rom())
        rom.flush()
        try:
            finished = run_program(probe_command_line(qemu, rom.name), timeout=_LIMIT)
        except DeadlineExceeded:
            return Verdict(
                DomainType.QEMU,
                f"a probe guest under KVM did not finish within {_LIMIT:.0f} s: KVM here cannot run kernels",
                final=False,
            )
        except ShimError as exc:
            return Verdict(DomainType.QEMU, f"KVM could not be probed: {exc}", final=False)
    if finished.returncode == PROBE_GUEST_PASSED:
        return Verdict(DomainType.KVM, "a probe guest ran under KVM")
    return Verdict(DomainType.QEMU, f"KVM cannot run a guest here: {finished.summary()}")


def probe_command_line(qemu: str, rom: str) -> list[str]:
    machine = ["-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "16", "-bios", rom]
    exit_device = ["-device", "isa-debug-exit,iobase=0xf4,iosize=1"]
    quiet = ["-display", "none", "-nodefaults", "-no-user-config", "-no-reboot", "-serial", "stdio", "-sandbox", "on"]
    return [qemu, *machine, *exit_device, *quiet]


def _key(qemu: str) -> str:
    """A verdict is valid for one boot and one QEMU."""
    try:
        changed = os.stat(qemu).st_mtime_ns
    except OSError:
        changed = 0
    return f"{boot_id()} {qemu} {changed}"


def _recall(path: str, key: str) -> Verdict | None:
    """None if the file is unusable: a new probe is cheap."""
    try:
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
        if kept["key"] != key:
            return None
        return Verdict(DomainType(kept["domain_type"]), str(kept["why"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(path: str, key: str, verdict: Verdict) -> None:
    content = json.dumps({"key": key, "domain_type": verdict.domain_type.value, "why": verdict.why})
    try:
        replace_text(path, content, 0o644)
    except OSError as exc:
        log.warning("kvm.probe.not_saved", path=path, error=exc.strerror)  # the next start probes again
