"""Which UEFI a node has: what its packages describe, and whether the files of one that a disk knows are still there.

A VM whose variables are older than itself has the files that they were made for: those of another build may keep them in another
shape, and what a guest has sealed to its TPM goes by what started it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from virtshim.domain.errors import WrongState
from virtshim.domain.hardware.annotations import FIRMWARE
from virtshim.domain.hardware.options import Firmware, FirmwareFiles

# Where packages describe their firmware; a file of a directory further on is in place of one of that name.
DESCRIPTORS: Final = ("/usr/share/qemu/firmware", "/etc/qemu/firmware")


def kinds(directories: Sequence[str] = DESCRIPTORS) -> frozenset[Firmware]:
    """What can be had."""
    return frozenset({Firmware.BIOS, *(kind for kind, _ in _described(directories))})


def first(wanted: Firmware, directories: Sequence[str] = DESCRIPTORS) -> FirmwareFiles | None:
    """What libvirt takes: the first of that kind, by the names of the descriptors. None if there is none, or it is no pair of raw
    files."""
    for kind, descriptor in _described(directories):
        if kind is wanted:
            return _files(descriptor.get("mapping"))
    return None


def refuse_gone(files: FirmwareFiles, nvram: str) -> None:
    """WrongState, naming the file. `nvram`: the variables; while they are not there `files` are those that the node has now."""
    if not os.path.exists(nvram):
        _refuse_undelivered(files)
        return
    if not os.path.exists(files.code):
        raise WrongState(
            f"annotation {FIRMWARE}: {files.code}, which started this disk first, is gone; {_remedy(nvram)}"
        )
    with contextlib.suppress(OSError):
        if os.path.getsize(files.variables) != os.path.getsize(nvram):
            raise WrongState(
                f"annotation {FIRMWARE}: {files.variables} has another size than this disk's variables, which were made of it: "
                f"the firmware is another build; {_remedy(nvram)}"
            )


def _refuse_undelivered(files: FirmwareFiles) -> None:
    for path in (files.code, files.variables):
        if not os.path.exists(path):
            raise WrongState(
                f"annotation {FIRMWARE}: {path}, which a descriptor of this node names (in {' or '.join(DESCRIPTORS)}), is not "
                "there; install its package anew (ovmf), or remove that descriptor"
            )


def _remedy(nvram: str) -> str:
    return (
        "install the version of its package again that this node had (ovmf), or give the guest new variables, of the firmware "
        f"that is there now: remove {nvram} (keys that the guest has sealed to its TPM are lost to it then)"
    )


def _described(directories: Sequence[str]) -> Iterator[tuple[Firmware, Any]]:
    """In the order in which libvirt looks at them."""
    files: dict[str, Path] = {}
    for directory in directories:
        with contextlib.suppress(OSError):
            files |= {name: Path(directory, name) for name in os.listdir(directory) if name.endswith(".json")}
    for _, file in sorted(files.items()):
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            descriptor = json.loads(file.read_text())
            if (kind := _kind(descriptor)) is not None:
                yield kind, descriptor


def _kind(descriptor: Any) -> Firmware | None:
    targets = descriptor.get("targets", [])
    for_q35 = any(
        target.get("architecture") == "x86_64" and any("q35" in machine for machine in target.get("machines", []))
        for target in targets
    )
    if "uefi" not in descriptor.get("interface-types", []) or not for_q35:
        return None
    features = set(descriptor.get("features", []))
    if {"secure-boot", "enrolled-keys"} <= features:
        return Firmware.SECURE
    return None if features & {"secure-boot", "requires-smm"} else Firmware.UEFI


def _files(mapping: Any) -> FirmwareFiles | None:
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        pair = [mapping["executable"], mapping["nvram-template"]]
        is_flash = mapping["device"] == "flash" and mapping.get("mode", "split") == "split"
        if is_flash and all(one["format"] == "raw" and os.path.isabs(one["filename"]) for one in pair):
            return FirmwareFiles(*(one["filename"] for one in pair))
    return None
