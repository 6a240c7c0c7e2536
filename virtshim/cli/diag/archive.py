"""One tarball, root's alone, that appears when it is whole."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Mapping

from virtshim.domain.errors import InvalidRequest
from virtshim.files import sync


def write(directory: str, name: str, files: Mapping[str, str], now: int) -> str:
    """DIRECTORY/NAME.tar.gz, in which all is below NAME/. Its path; raises InvalidRequest where it cannot be written."""
    path = f"{directory}/{name}.tar.gz"
    part = f"{directory}/.{name}.part"
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "wb") as file:
                with tarfile.open(fileobj=file, mode="w:gz") as archive:
                    for below, text in files.items():
                        content = text.encode(errors="replace")
                        entry = tarfile.TarInfo(f"{name}/{below}")
                        entry.size, entry.mode, entry.mtime = len(content), 0o600, now
                        archive.addfile(entry, io.BytesIO(content))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            sync(directory)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            raise
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be written: {exc.strerror}; name a directory with room for it") from exc
    return path
