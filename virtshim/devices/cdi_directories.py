"""The CDI specifications of this node: finds the device that a name means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from virtshim.devices.cdi_spec import MAX_BYTES, CdiDevice, CdiSpec, check_name, parse_spec
from virtshim.devices.host_files import HostFiles
from virtshim.devices.values import CriDevice, PciAddress
from virtshim.model.errors import InvalidRequest

log = structlog.get_logger(__name__)

# In one directory; further files are ignored.
_MAX_FILES: Final = 1000
# Bytes of all specifications together. Parsing that many takes up to ten seconds.
_MAX_IN_ALL: Final = 16 * MAX_BYTES


@dataclass(frozen=True, slots=True)
class CdiGrant:
    """What the names of one request mean together. `envs`: (variable, value, path of the specification). `not_given`:
    as in GrantedDevices."""

    nodes: tuple[CriDevice, ...] = ()
    envs: tuple[tuple[str, str, str], ...] = ()
    addresses: tuple[PciAddress, ...] = ()
    faults: tuple[str, ...] = ()
    not_given: tuple[str, ...] = ()


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
        """Returns `text`, or raises InvalidRequest if all specifications together are too large."""
        self._left -= len(text)
        if self._left < 0:
            raise InvalidRequest(
                f"beyond the {_MAX_IN_ALL} bytes allowed for all specifications together; remove those of missing devices"
            )
        return text

    def add(self, path: str, priority: int, spec: CdiSpec) -> None:
        """Adds a specification. A later directory overrides an earlier one. If one directory has a device twice, nobody
        gets it, as in containerd and CRI-O."""
        self.valid += 1
        for device in spec.devices:
            name = f"{spec.kind}={device.name}"
            before = self.devices.get(name)
            if before is not None and before.priority == priority:
                self.conflicts[name] = (before.path, path)
            self.devices[name] = _Found(path, priority, spec, device)


def _refuse_unfit(name: str, found: _Found) -> None:
    """Raises InvalidRequest for a device of which a VM would get nothing, or nothing useful. Other devices lose only
    what a VM cannot have, and the status says so: specifications of GPUs always have driver libraries and hooks for
    containers."""
    own, shared = found.device.edits, found.spec.edits
    left_out = own.left_out | shared.left_out
    if "netDevices" in left_out:
        raise InvalidRequest(
            f"{name} is a network interface of the node (netDevices in {found.path}), which a virtual machine cannot have; bind "
            "its function to vfio-pci and let the device plugin grant that, or attach it by a CNI plugin such as sriov"
        )
    usable = found.device.address is not None or own.nodes or own.envs or shared.nodes or shared.envs
    if left_out and not usable:
        raise InvalidRequest(
            f"{name} has nothing that a virtual machine can use: only {' and '.join(sorted(left_out))} ({found.path}); mount "
            "files as a volume of the pod, or put them into the image"
        )


class CdiDirectories:
    """Reads the directories for each request with names, because plugins write specifications at any time."""

    def __init__(self, directories: Sequence[str], files: HostFiles) -> None:
        self._directories = directories
        self._files = files

    def find(self, names: Sequence[str]) -> CdiGrant:
        """Never raises: the answer contains the faults of names."""
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
        }.items():  # once for each specification, however many of its devices are requested
            edits.append(spec.edits)
            origins.append(path)
        left_out: dict[str, set[str]] = {}
        for path, edit in zip(origins, edits, strict=True):
            if edit.left_out:
                left_out.setdefault(path, set()).update(edit.left_out)
        return CdiGrant(
            nodes=tuple(node for edit in edits for node in edit.nodes),
            envs=tuple((*env, path) for path, edit in zip(origins, edits, strict=True) for env in edit.envs),
            addresses=tuple(one.device.address for one in found if one.device.address is not None),
            faults=tuple(faults),
            not_given=tuple(f"{' and '.join(sorted(fields))} of {path}" for path, fields in left_out.items()),
        )

    def survey(self) -> tuple[int, tuple[str, ...]]:
        """How many specifications are usable, and the faults of the others and of devices that exist twice."""
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
        _refuse_unfit(name, found)
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
