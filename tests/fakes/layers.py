"""Layers of OCI images, made entry by entry."""

from __future__ import annotations

import gzip
import io
import tarfile
from typing import Any

from virtshim.images.confined import frames


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.size = kind, len(data)
    for field, value in fields.items():
        setattr(made, field, value)
    return made, data


def folder(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.DIRTYPE, **{"mode": 0o755, **fields})


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.SYMTYPE, linkname=target)


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.LNKTYPE, linkname=target)


def layer(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for header, data in entries:
            archive.addfile(header, io.BytesIO(data))
    return buffer.getvalue()


def same_gzip(plain: bytes) -> bytes:
    """The same bytes at any time."""
    return gzip.compress(plain, 1, mtime=0)


def said(kind: str, path: str, more: str = "") -> bytes:
    """A message of the process that reads the layers."""
    return frames.names(kind, path, "420", "0", "0", "0", more)
