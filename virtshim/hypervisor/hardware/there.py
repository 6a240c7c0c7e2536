"""Whether this node has what UEFI and TPMs need: asked before a VM is defined, whose start would fail."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from virtshim.domain.errors import Unimplemented
from virtshim.domain.hardware.annotations import FIRMWARE, TPM
from virtshim.domain.hardware.options import Firmware, HardwareOptions

# Where packages describe their firmware; a file of a directory further on is in place of one of that name.
DESCRIPTORS: Final = ("/usr/share/qemu/firmware", "/etc/qemu/firmware")
# swtpm's, which libvirt runs.
PROGRAMS: Final = ("swtpm", "swtpm_setup")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def refuse_missing(wanted: HardwareOptions) -> None:
    """Unimplemented, naming annotation and remedy."""
    if wanted.firmware.is_uefi and wanted.firmware not in firmwares():
        raise Unimplemented(
            f"annotation {FIRMWARE}: this node has no firmware for {wanted.firmware.value}; install its package "
            "(apt-get install ovmf), or have the pod scheduled to another node"
        )
    if wanted.tpm and (missing := programs_missing()):
        raise Unimplemented(
            f"annotation {TPM}: this node has no {' and no '.join(missing)}; install it (apt-get install swtpm swtpm-tools), "
            "or have the pod scheduled to another node"
        )


def programs_missing() -> Sequence[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def firmwares(directories: Sequence[str] = DESCRIPTORS) -> frozenset[Firmware]:
    """What can be had."""
    files: dict[str, Path] = {}
    for directory in directories:
        with contextlib.suppress(OSError):
            files |= {name: Path(directory, name) for name in os.listdir(directory) if name.endswith(".json")}
    found = {Firmware.BIOS}
    for file in files.values():
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            found |= _described(json.loads(file.read_text()))
    return frozenset(found)


def _described(descriptor: Any) -> set[Firmware]:
    targets = descriptor.get("targets", [])
    for_q35 = any(
        target.get("architecture") == "x86_64" and any("q35" in machine for machine in target.get("machines", []))
        for target in targets
    )
    if "uefi" not in descriptor.get("interface-types", []) or not for_q35:
        return set()
    features = set(descriptor.get("features", []))
    if {"secure-boot", "enrolled-keys"} <= features:
        return {Firmware.SECURE}
    return set() if "secure-boot" in features else {Firmware.UEFI}
