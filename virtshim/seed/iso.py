"""Writes a guest's first-boot files into its container's directory: the seed ISO, Ignition's configuration, Windows' answers."""

from __future__ import annotations

import contextlib
import io
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Final

from virtshim.model.errors import InternalError, ResourceExhausted
from virtshim.model.ids import ContainerId
from virtshim.model.image import DiskFormat
from virtshim.model.layout import Layout, ignition_file, sysprep_iso
from virtshim.model.vm import Disk
from virtshim.seed.documents import SeedDocuments, seed_documents
from virtshim.seed.ports import SeedRequest
from virtshim.system.files import OUT_OF_SPACE, make_directory, open_regular, replace_bytes
from virtshim.volumes.mount_script import SEED_FILE

_MAX_BYTES: Final = 256 << 10


def read_hosts_file(path: str, pod_uid: str) -> bytes:
    """The pod's hosts file by kubelet: the pod's names and its hostAliases. b"" if the file is missing, is not a regular file in
    that pod's directory, or is too large."""
    if not path.endswith(f"/pods/{pod_uid}/etc-hosts"):
        return b""
    with contextlib.suppress(OSError), open_regular(path) as file:
        content = file.read(_MAX_BYTES + 1)
        return content if len(content) <= _MAX_BYTES else b""
    return b""


_SERIAL: Final = "seed"
_SYSPREP_LABEL: Final = "unattendCD"
# Modes in the guest. Only root may read, because user-data may hold passwords.
_GUEST_FILE_MODE: Final = 0o100400
_GUEST_DIR_MODE: Final = 0o040500
# ISO 9660, level 3: a file's name has at most 30 characters, a directory's 31.
_PLAIN_LENGTH: Final = 30
_NOT_PLAIN: Final = re.compile("[^A-Z0-9_]")


class SeedStore:
    """Implements `virtshim.seed.ports.GuestSeeds`. The files are deleted with the container's directory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def create(self, request: SeedRequest) -> Disk:
        """A repeated call replaces the file atomically."""
        hosts = read_hosts_file(request.hosts_file, request.pod.uid)
        image = _seed(seed_documents(request, hosts), request.copied)
        path = self._layout.seed_iso(request.container)
        with _writing(path):
            make_directory(self._layout.containers, 0o711)  # QEMU's user passes through both
            make_directory(self._layout.container_dir(request.container), 0o711)
            _replace(path, image)
        return Disk(path=path, format=DiskFormat.RAW, serial=_SERIAL, readonly=True, cdrom=True)

    def write_ignition(self, container: ContainerId, text: str) -> str:
        path = ignition_file(self._layout, container)
        with _writing(path):
            _replace(path, text.encode())
        return path

    def write_sysprep(self, container: ContainerId, files: Mapping[str, bytes]) -> str:
        path = sysprep_iso(self._layout, container)
        with _writing(path):
            _replace(path, _iso(_SYSPREP_LABEL, files))
        return path


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{path}, a file for the guest's first boot, cannot be written: {error.strerror}"
        if error.errno in OUT_OF_SPACE:
            raise ResourceExhausted(f"{what}; free space on that file system") from error
        raise InternalError(what) from error


def _replace(path: str, content: bytes) -> None:
    """Does not sync: a power cut also ends the VM, and no later VM gets this file."""
    replace_bytes(path, content, synced=False)


def _seed(documents: SeedDocuments, copied: bytes) -> bytes:
    files = {path: text.encode() for path, text in documents.files.items()}
    return _iso(documents.label, {**files, SEED_FILE: copied} if copied else files)


def _iso(label: str, files: Mapping[str, bytes]) -> bytes:
    """Rock Ridge and Joliet hold the unchanged names."""
    import pycdlib  # loaded late, because it takes 2 MiB and a restarted virtshim needs it only for the next new VM

    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, vol_ident=label, joliet=3, rock_ridge="1.09")
    try:
        plain, used = {"": ""}, set[str]()
        for path, content in files.items():
            directory, name = posixpath.split(path)
            for above in _with_parents(directory):
                if above not in plain:
                    plain[above] = _plain(above, plain, used)
                    iso.add_directory(
                        plain[above],
                        rr_name=posixpath.basename(above),
                        joliet_path=f"/{above}",
                        file_mode=_GUEST_DIR_MODE,
                    )
            plain[path] = _plain(path, plain, used)
            iso.add_fp(
                io.BytesIO(content),
                len(content),
                iso_path=f"{plain[path]}.;1",
                rr_name=name,
                joliet_path=f"/{path}",
                file_mode=_GUEST_FILE_MODE,
            )
        written = io.BytesIO()
        iso.write_fp(written)
    finally:
        iso.close()
    return written.getvalue()


def _with_parents(directory: str) -> Iterator[str]:
    """`directory` and its parents, from the top down."""
    parts = [part for part in directory.split("/") if part]
    yield from ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def _plain(path: str, above: Mapping[str, str], used: set[str]) -> str:
    """A unique ISO 9660 path for `path`: short names of capitals, digits and underscores. `above`: directory -> its ISO 9660
    path. `used`: the ISO 9660 paths so far; the new one is added."""
    directory, name = posixpath.split(path)
    word = _NOT_PLAIN.sub("_", name.upper())[:_PLAIN_LENGTH]
    found, number = f"{above[directory]}/{word}", 1
    while found in used:
        number += 1
        end = f"_{number}"
        found = f"{above[directory]}/{word[: _PLAIN_LENGTH - len(end)]}{end}"
    used.add(found)
    return found
