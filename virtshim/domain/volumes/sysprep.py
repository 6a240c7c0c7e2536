"""A Windows guest's answer file: a mounted Secret or ConfigMap whose files are a CD-ROM in the guest, and no volume. Pure.

Windows' setup, and sysprep's at the first boot, look for it in the root directory of each read-only drive.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from virtshim.domain.container import Mount
from virtshim.domain.errors import InvalidRequest, NotFound
from virtshim.domain.printable import escaped
from virtshim.domain.volumes.copies import DATA, CopiedVolume, Entry, EntryKind
from virtshim.domain.volumes.pod_mounts import Origin, normal, origins

ANNOTATION: Final = "virtshim.io/sysprep"
# Of the CD-ROM; one of them must be there. Windows does not tell small letters from others.
ANSWER_FILES: Final = ("autounattend.xml", "unattend.xml")


def parse(text: str) -> str:
    """A mount path, in its normal form; "" for none. Raises InvalidRequest."""
    path = text.strip()
    if path and (not path.startswith("/") or ".." in path.split("/") or normal(path) == "/" or not path.isprintable()):
        raise InvalidRequest(f"{escaped(path, 80)!r} is no mountPath of the pod; write an absolute path without '..'")
    return normal(path) if path else ""


def volume(mounts: Iterable[Mount], annotations: Mapping[str, str], pod_uid: str, path: str) -> CopiedVolume:
    """The one that is mounted at `path`. Raises InvalidRequest for one that kubelet does not write: others change while they are
    read, and are a guest's own by other ways."""
    for mount, origin in origins(mounts, annotations, pod_uid):
        if normal(mount.container_path) != path:
            continue
        if origin is not Origin.COPY:
            raise InvalidRequest(
                f"annotation {ANNOTATION}: the volume at {escaped(path, 200)} is no Secret or ConfigMap"
            )
        return CopiedVolume(path, mount.host_path)
    raise NotFound(
        f"annotation {ANNOTATION}: no volume is mounted at {escaped(path, 200)}; mount a Secret or ConfigMap there"
    )


def files(entries: Sequence[Entry]) -> dict[str, bytes]:
    """Name -> content, of what a container would see in its root directory. Raises InvalidRequest without an answer file."""
    current = next((one.target for one in entries if one.path == DATA), "")
    found = {
        posixpath.relpath(one.path, current): one.content
        for one in entries
        if one.kind is EntryKind.FILE and current and posixpath.dirname(one.path) == current
    }
    if not any(name.lower() in ANSWER_FILES for name in found):
        names = escaped(", ".join(sorted(found)), 200) or "nothing"
        raise InvalidRequest(
            f"annotation {ANNOTATION}: the volume has no {' and no '.join(ANSWER_FILES)}, but {names}; name a key so"
        )
    return found
