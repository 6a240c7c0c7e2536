"""The CDI specifications of this node: which device is meant by a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.devices.cdi_spec import MAX_BYTES, CdiDevice, CdiSpec, check_name, parse_spec
from virtshim.devices.host_files import HostFiles
from virtshim.domain.devices.granted import CriDevice, PciAddress
from virtshim.domain.errors import InvalidRequest

log = structlog.get_logger(__name__)

# Of one directory; the rest is not looked at.
_MAX_FILES: Final = 1000
# Bytes of all specifications together: to understand as many takes up to ten seconds.
_MAX_IN_ALL: Final = 16 * MAX_BYTES


@dataclass(frozen=True, slots=True)
class CdiGrant:
    """What the names of one request stand for, together. `envs`: (variable, value, path of the specification)."""

    nodes: tuple[CriDevice, ...] = ()
    envs: tuple[tuple[str, str, str], ...] = ()
    addresses: tuple[PciAddress, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    path: str
    priority: int
    spec: CdiSpec
    device: CdiDevice


class _Read:
    """All directories, read once."""

    def __init__(self) -> None:
        self.devices: dict[str, _Found] = {}
        self.conflicts: dict[str, tuple[str, str]] = {}
        self.invalid: list[str] = []
        self.valid = 0
        self._left = _MAX_IN_ALL

    def within(self, text: bytes) -> bytes:
        """InvalidRequest if it is too much."""
        self._left -= len(text)
        if self._left < 0:
            raise InvalidRequest(
                f"beyond the {_MAX_IN_ALL} bytes allowed for all specifications together; remove those of devices that are gone"
            )
        return text

    def add(self, path: str, priority: int, spec: CdiSpec) -> None:
        """A later directory wins; two in one directory are nobody's device, as containerd and CRI-O have it."""
        self.valid += 1
        for device in spec.devices:
            name = f"{spec.kind}={device.name}"
            before = self.devices.get(name)
            if before is not None and before.priority == priority:
                self.conflicts[name] = (before.path, path)
            self.devices[name] = _Found(path, priority, spec, device)


class CdiDirectories:
    """Reads them at each request that has names: plugins write specifications while pods come and go."""

    def __init__(self, directories: Sequence[str], files: HostFiles) -> None:
        self._directories = directories
        self._files = files

    def find(self, names: Sequence[str]) -> CdiGrant:
        """Never raises: what is wrong with a name is a fault of the answer."""
        if not names:
            return CdiGrant()
        read = self._read()
        for trouble in read.invalid:
            log.warning("cdi.invalid_spec", error=trouble)
        found, faults = [], []
        for name in dict.fromkeys(names):
            try:
                found.append(self._one(name, read))
            except InvalidRequest as exc:
                faults.append(f"CDI: {exc}")
        edits = [one.device.edits for one in found]
        origins = [one.path for one in found]
        for path, spec in {
            one.path: one.spec for one in found
        }.items():  # once, however many of its devices are asked for
            edits.append(spec.edits)
            origins.append(path)
        for path, edit in zip(origins, edits, strict=True):
            if edit.left_out:
                log.warning("cdi.not_for_vms", spec=path, left_out=sorted(edit.left_out))
        return CdiGrant(
            nodes=tuple(node for edit in edits for node in edit.nodes),
            envs=tuple((*env, path) for path, edit in zip(origins, edits, strict=True) for env in edit.envs),
            addresses=tuple(one.device.address for one in found if one.device.address is not None),
            faults=tuple(faults),
        )

    def survey(self) -> tuple[int, tuple[str, ...]]:
        """How many specifications can be used, and what is wrong: with others, and with devices that are there twice."""
        read = self._read()
        twice = (f"{name} is in {' and '.join(paths)}" for name, paths in sorted(read.conflicts.items()))
        return read.valid, (*read.invalid, *twice)

    def _one(self, name: str, read: _Read) -> _Found:
        check_name(name)
        if name in read.conflicts:
            both = " and ".join(read.conflicts[name])
            raise InvalidRequest(f"{name} is described twice, by {both}; remove one")
        found = read.devices.get(name)
        if found is None:
            where = " and ".join(self._directories) or "no directory (devices.cdi_dirs)"
            invalid = f"; specifications that cannot be used: {'; '.join(read.invalid)}" if read.invalid else ""
            raise InvalidRequest(
                f"no specification in {where} describes {name}; check that its device plugin runs on this node{invalid}"
            )
        return found

    def _read(self) -> _Read:
        read = _Read()
        for priority, directory in enumerate(self._directories):
            names = [name for name in self._files.names(directory) if name.endswith((".json", ".yaml"))]
            for name in names[:_MAX_FILES]:
                path = f"{directory.rstrip('/')}/{name}"
                try:
                    read.add(path, priority, parse_spec(read.within(self._files.content(path, MAX_BYTES))))
                except InvalidRequest as exc:
                    read.invalid.append(f"{path}: {exc}")
        return read
