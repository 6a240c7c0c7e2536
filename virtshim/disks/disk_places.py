"""Small files beside each pod's disk: its device addresses, firmware and TPMs."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from virtshim.model.errors import InternalError
from virtshim.model.hardware import BYTES, Firmware, FirmwareFiles, Places, places_from_bytes
from virtshim.model.layout import Layout, kept_firmware, kept_variables
from virtshim.model.sandbox import VMS
from virtshim.system.files import replace_bytes, replace_text

_TPM = ".tpm"


class DiskPlacesFiles:
    """Implements `virtshim.disks.ports.DiskPlaces`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def read(self, disk: str) -> Places:
        path = self._file(disk)
        try:
            return places_from_bytes(path.read_bytes()[:BYTES])
        except FileNotFoundError:
            return Places()
        except OSError as exc:  # the guest knows these addresses, so they must not change
            raise InternalError(
                f"pod disk {disk}: its device addresses cannot be read from {path}: {exc.strerror}"
            ) from exc

    def keep(self, disk: str, places: Places) -> None:
        path = self._file(disk)
        try:
            replace_bytes(str(path), places.to_bytes())
        except OSError as exc:
            raise InternalError(
                f"pod disk {disk}: its device addresses cannot be written to {path}: {exc.strerror}"
            ) from exc

    def firmware(self, disk: str, kind: Firmware) -> FirmwareFiles | None:
        path = Path(kept_firmware(self._layout, disk, kind))
        try:
            os.stat(kept_variables(self._layout, disk, kind))
            code, variables = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        except (FileNotFoundError, ValueError):
            return None
        except OSError as exc:
            raise InternalError(f"pod disk {disk}: its firmware cannot be read from {path}: {exc.strerror}") from exc
        return FirmwareFiles(code, variables)

    def keep_firmware(self, disk: str, kind: Firmware, files: FirmwareFiles) -> None:
        path = kept_firmware(self._layout, disk, kind)
        try:
            replace_bytes(path, os.fsencode(f"{files.code}\n{files.variables}\n"))
        except OSError as exc:
            raise InternalError(f"pod disk {disk}: its firmware cannot be written to {path}: {exc.strerror}") from exc

    def keep_tpm(self, disk: str, domain: uuid.UUID) -> None:
        path = Path(self._layout.pod_disk(disk)).with_suffix(_TPM)
        try:
            known = path.read_text(encoding="ascii").split() if path.exists() else []
            if str(domain) not in known:
                replace_text(str(path), "".join(f"{one}\n" for one in (*known, str(domain))))
        except (OSError, ValueError) as exc:
            raise InternalError(f"pod disk {disk}: its TPM cannot be written to {path}: {exc}") from exc

    def tpm_owners(self, domain: uuid.UUID) -> frozenset[str]:
        owners: list[str] = []
        for directory, prefix in ((self._layout.pod_disks, ""), (self._layout.vms, f"{VMS}/")):
            try:
                owners += [f"{prefix}{name}" for name in os.listdir(directory)]
            except FileNotFoundError:
                continue
            except OSError as exc:
                raise InternalError(f"the owners of the TPM of VM {domain} cannot be read: {exc.strerror}") from exc
        return frozenset(owner for owner in owners if str(domain) in tpm_uuids(self._layout, owner))

    def _file(self, disk: str) -> Path:
        return Path(self._layout.pod_disk(disk)).with_suffix(".places")


def tpm_uuids(layout: Layout, owner: str) -> list[str]:
    """The TPMs of the disks of that pod or VM. Raises InternalError if a file cannot be read: its TPMs still have an owner."""
    found = []
    try:
        for path in Path(layout.kept(f"{owner}/root")).parent.glob(f"*{_TPM}"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                found += [str(uuid.UUID(word)) for word in path.read_text(encoding="ascii").split()]
    except OSError as exc:
        raise InternalError(f"the TPMs of {owner} cannot be read: {exc.strerror}") from exc
    return found
