"""The cloud-init seed: an ISO with the NoCloud label, in the container's directory."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from typing import Final

import pycdlib

from virtshim.domain.errors import InternalError, ResourceExhausted
from virtshim.domain.image import DiskFormat
from virtshim.domain.layout import Layout
from virtshim.domain.vm import Disk
from virtshim.domain.volumes.guest_script import SEED_FILE
from virtshim.guestinit.documents import SeedDocuments, seed_documents
from virtshim.guestinit.hosts_file import read_hosts_file
from virtshim.ports.seeds import SeedRequest

_LABEL: Final = "cidata"
_SERIAL: Final = "seed"
# In the guest; user-data may hold passwords.
_GUEST_FILE_MODE: Final = 0o100400
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


class SeedStore:
    """Implements GuestSeeds. The file belongs to the container's directory and goes with it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def create(self, request: SeedRequest) -> Disk:
        """A repeated call replaces the file; a reader never sees half of it."""
        hosts = read_hosts_file(request.hosts_file, request.pod.uid)
        image = _iso(seed_documents(request, hosts), request.copied)
        path = self._layout.seed_iso(request.container)
        with _writing(path):
            _make_directory(self._layout.container_dir(request.container))
            _replace(path, image)
        return Disk(path=path, format=DiskFormat.RAW, serial=_SERIAL, readonly=True, cdrom=True)


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the cloud-init seed {path} cannot be written: {error.strerror}"
        if error.errno in _NO_SPACE:
            raise ResourceExhausted(f"{what}; free space on that file system") from error
        raise InternalError(what) from error


def _make_directory(path: str) -> None:
    """Searchable by the QEMU user, whatever the umask."""
    os.makedirs(os.path.dirname(path), mode=0o711, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        os.chmod(path, 0o711)  # noqa: S103


def _replace(path: str, content: bytes) -> None:
    """Write beside, rename. What a killed process left beside is overwritten. Not synced: a power cut ends its VM, too, and no
    later one gets this file."""
    beside = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    os.rename(beside, path)


def _iso(documents: SeedDocuments, copied: bytes) -> bytes:
    """Rock Ridge and Joliet carry the names as they are; ISO 9660's own are upper case."""
    files = [("user-data", documents.user_data.encode()), ("meta-data", documents.meta_data.encode())]
    if documents.network_config is not None:
        files.append(("network-config", documents.network_config.encode()))
    if documents.vendor_data:
        files.append(("vendor-data", documents.vendor_data.encode()))
    if copied:
        files.append((SEED_FILE, copied))
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, vol_ident=_LABEL, joliet=3, rock_ridge="1.09")
    try:
        for name, content in files:
            iso.add_fp(
                io.BytesIO(content),
                len(content),
                iso_path=f"/{name.upper().replace('-', '_').replace('.', '_')}.;1",
                rr_name=name,
                joliet_path=f"/{name}",
                file_mode=_GUEST_FILE_MODE,
            )
        written = io.BytesIO()
        iso.write_fp(written)
    finally:
        iso.close()
    return written.getvalue()
