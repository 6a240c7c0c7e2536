"""A Windows guest's answer file: a mounted Secret or ConfigMap whose files are on a CD-ROM in the guest. No I/O."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from virtshim.devices.guest_view import normal_path
from virtshim.model.container import ContainerConfig, Mount
from virtshim.model.errors import InvalidRequest
from virtshim.model.text import escaped
from virtshim.volumes.copies import DATA, CopiedVolume, Entry, EntryKind
from virtshim.volumes.pod_mounts import Origin, origins
from virtshim.volumes.ports import KubeletVolumes

# Windows' setup, and sysprep at the first boot, look for the answer file in the root directory of each read-only drive.

SYSPREP_ANNOTATION: Final = "virtshim.io/sysprep"
# One of these must be on the CD-ROM. Windows ignores case.
ANSWER_FILES: Final = ("autounattend.xml", "unattend.xml")

# Where the service account of every pod is mounted.
_TOKENS: Final = "/var/run/secrets/kubernetes.io/"

# The longest name on a CD-ROM in Joliet, which Windows reads. Its characters are UCS-2.
_LONGEST: Final = 64
_FORBIDDEN: Final = "*/:;?\\"


def sysprep_volume(
    mounts: Iterable[Mount], annotations: Mapping[str, str], pod_uid: str, path: str
) -> CopiedVolume | None:
    """The volume that is mounted at `path`, None if there is none: init containers may have fewer mounts. Raises
    InvalidRequest for a volume that kubelet does not write. Such a volume may change during a read, and a guest gets it
    in other ways."""
    for mount, origin in origins(mounts, annotations, pod_uid):
        if normal_path(mount.container_path) != path:
            continue
        if origin is not Origin.COPY:
            raise InvalidRequest(
                f"annotation {SYSPREP_ANNOTATION}: the volume at {escaped(path, 200)} is not a Secret or ConfigMap"
            )
        return CopiedVolume(path, mount.host_path)
    return None


def sysprep_not_mounted(mounts: Iterable[Mount], annotations: Mapping[str, str], pod_uid: str, path: str) -> str:
    """The fault of a pod in which no container mounts the path, with the remedy. `mounts`: those of the last
    container."""
    places = [
        escaped(normal_path(mount.container_path), 200)
        for mount, origin in origins(mounts, annotations, pod_uid)
        if origin is Origin.COPY and not normal_path(mount.container_path).startswith(_TOKENS)
    ]
    there = f"has Secrets and ConfigMaps at {', '.join(places)}" if places else "mounts no Secret and no ConfigMap"
    remedy = "write one of these mountPaths, or" if places else "let it"
    return (
        f"annotation {SYSPREP_ANNOTATION}: no container of the pod mounts anything at {escaped(path, 200)}; this one {there}; "
        f"{remedy} mount the volume with the answer file there, or remove the annotation"
    )


def read_sysprep_files(written: KubeletVolumes, config: ContainerConfig, pod_uid: str, path: str) -> dict[str, bytes]:
    """The files of the volume that is mounted at `path`, {} if there is none. Raises ShimError."""
    volume = sysprep_volume(config.mounts, config.annotations, pod_uid, path)
    return {} if volume is None else sysprep_files(written.read(volume))


def sysprep_files(entries: Sequence[Entry]) -> dict[str, bytes]:
    """Name -> content of the files that a container would see in the volume's root directory. Raises InvalidRequest if
    no answer file is among them, or if a name is not possible on the CD-ROM."""
    current = next((one.target for one in entries if one.path == DATA), "")
    found = {
        posixpath.relpath(one.path, current): one.content
        for one in entries
        if one.kind is EntryKind.FILE and current and posixpath.dirname(one.path) == current
    }
    if not any(name.lower() in ANSWER_FILES for name in found):
        names = escaped(", ".join(sorted(found)), 200) or "nothing"
        raise InvalidRequest(
            f"annotation {SYSPREP_ANNOTATION}: the volume has no {' and no '.join(ANSWER_FILES)}, but {names}; rename a key"
        )
    _refuse_names(found)
    return found


def _refuse_names(names: Collection[str]) -> None:
    alike: dict[str, str] = {}
    for name in sorted(names):
        if why := _why_not(name):
            raise InvalidRequest(
                f"annotation {SYSPREP_ANNOTATION}: the file {escaped(name, 300)!r} cannot be on a CD-ROM: {why}"
            )
        if (other := alike.setdefault(name.lower(), name)) != name:
            raise InvalidRequest(
                f"annotation {SYSPREP_ANNOTATION}: Windows ignores case, so the files {other!r} and {name!r} have the same name; "
                "rename one"
            )


def _why_not(name: str) -> str:
    """Why Joliet cannot have the name, and the remedy; "" if it can."""
    if len(name) > _LONGEST:
        return f"its name has {len(name)} characters, but Joliet allows {_LONGEST}; shorten it"
    bad = sorted({char for char in name if char in _FORBIDDEN or char < " " or not _is_ucs2(char)})
    return f"Joliet does not allow {escaped(' '.join(bad), 80)} in a name; leave it out" if bad else ""


def _is_ucs2(char: str) -> bool:
    """Half a surrogate pair stands for a byte that was not UTF-8."""
    return char <= "\uffff" and not "\ud800" <= char <= "\udfff"
