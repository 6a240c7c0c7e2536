"""Writes vmwrapper as one executable file: `python -m vmwrapper.bundle PATH`.

QEMU's user can read neither root's home nor a virtual environment, so the file carries all it needs and runs under the
system's Python, isolated (-I: no user site, no PYTHON* variables) and without site packages (-S). The same sources and the
same Python give the same bytes.

It carries its code compiled, too: a fifth of its time would go into that at each VM's start. A system's Python of another version
than the one that wrote the file does not take that, and compiles the sources.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import marshal
import os
import sys
import tempfile
import zipfile

_SHEBANG = b"#!/usr/bin/python3 -IS\n"
_MEMBERS = ("vmwrapper", "vmwrapper.__main__", "vmwrapper.argv_plan", "tapmanager", "tapmanager.protocol")
_MAIN = b"from vmwrapper.__main__ import main\n\nmain()\n"
# Zip's epoch: a fixed time stamp keeps the bytes reproducible.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build() -> bytes:
    """The whole file. Not compressed: that would load zlib at each start."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_STORED) as bundle:
        for path, data in (("__main__.py", _MAIN), *map(_source, _MEMBERS)):
            bundle.writestr(_member(path), data)
            bundle.writestr(_member(f"{path}c"), _compiled(path, data))
    return _SHEBANG + body.getvalue()


def _compiled(path: str, source: bytes) -> bytes:
    """A .pyc that is taken without a look at its source (PEP 552: flags 1, then the source's hash)."""
    # Version 2: later ones share equal objects as it happens, so that no two runs give the same bytes.
    code = compile(source, path, "exec", dont_inherit=True)
    return (
        importlib.util.MAGIC_NUMBER
        + (1).to_bytes(4, "little")
        + importlib.util.source_hash(source)
        + marshal.dumps(code, 2)
    )


def _member(path: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(path, _EPOCH)
    info.external_attr = 0o644 << 16
    return info


def _source(name: str) -> tuple[str, bytes]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the source of {name} is not there; install virtshim again")
    with open(spec.origin, "rb") as file:
        data = file.read()
    path = name.replace(".", "/")
    return (f"{path}/__init__.py" if spec.submodule_search_locations is not None else f"{path}.py"), data


def write(path: str) -> None:
    """Replaces `path` atomically, mode 0755; a VM starting right now runs the old or the new file, never half of one.

    A file that has these bytes already is left alone: libvirt probes an emulator anew when its time stamp changes. Raises
    OSError.
    """
    data = build()
    if _is_current(path, data):
        return
    fd, temporary = tempfile.mkstemp(prefix=".vmwrapper-", dir=os.path.dirname(path) or ".")
    try:
        with open(fd, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o755)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _is_current(path: str, data: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            return file.read() == data and found.st_mode & 0o777 == 0o755 and found.st_uid == os.geteuid()
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m vmwrapper.bundle PATH")
    write(sys.argv[1])
