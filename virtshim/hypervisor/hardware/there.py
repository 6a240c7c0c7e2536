"""Whether this node has what UEFI and TPMs need: asked before a VM is defined, whose start would fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from typing import Final

from virtshim.domain.errors import Unimplemented
from virtshim.domain.hardware.annotations import FIRMWARE, TPM
from virtshim.domain.hardware.options import Firmware, FirmwareFiles, HardwareOptions
from virtshim.hypervisor.hardware import uefi

# swtpm's, which libvirt runs.
PROGRAMS: Final = ("swtpm", "swtpm_setup")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def programs_missing() -> Sequence[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def refuse_missing(
    wanted: HardwareOptions,
    files: FirmwareFiles | None = None,
    nvram: str = "",
    kinds: Callable[[], Collection[Firmware]] = uefi.kinds,
    missing_programs: Callable[[], Sequence[str]] = programs_missing,
) -> None:
    """Unimplemented, naming annotation and remedy. `files`: whose variables those at `nvram` are, or will be, if that is known;
    WrongState if they are gone. `kinds` of firmware are installed here, and `missing_programs` of a TPM are not."""
    if files is not None:
        uefi.refuse_gone(files, nvram)
    elif wanted.firmware.is_uefi and wanted.firmware not in kinds():
        raise Unimplemented(
            f"annotation {FIRMWARE}: this node has no firmware for {wanted.firmware.value}; install its package "
            "(apt-get install ovmf), or have the pod scheduled to another node"
        )
    if wanted.tpm and (missing := missing_programs()):
        raise Unimplemented(
            f"annotation {TPM}: this node has no {' and no '.join(missing)}; install it (apt-get install swtpm swtpm-tools), "
            "or have the pod scheduled to another node"
        )
