"""Writes vmwrapper as one executable file: `python -m vmwrapper.bundle PATH`.

QEMU's user can read neither root's home nor a virtual environment. So the file contains everything and runs under the
system's Python, isolated (-I: no user site, no PYTHON* variables) and without site packages (-S). The same sources and the
same Python give the same bytes.

Each VM's start waits for it. So it is a script with compiled modules: loading runpy and zipimport for a zip archive would take as
long as starting Python. The sources are included too, for a system's Python of another version, which compiles them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import sys
import tempfile

# (name for imports, source), each after the modules that it imports.
_MODULES = (
    ("json", "vmwrapper.json_core"),
    ("socket", "vmwrapper.socket_core"),
    ("ctypes", "vmwrapper.ctypes_core"),
    ("tapmanager", "tapmanager"),
    ("tapmanager.protocol", "tapmanager.protocol"),
    ("vmwrapper", "vmwrapper"),
    ("vmwrapper.argv_plan", "vmwrapper.argv_plan"),
    ("vmwrapper.confine", "vmwrapper.confine"),
    ("vmwrapper.confine.kernel", "vmwrapper.confine.kernel"),
    ("vmwrapper.confine.landlock", "vmwrapper.confine.landlock"),
    ("vmwrapper.confine.seccomp", "vmwrapper.confine.seccomp"),
    ("vmwrapper.landlock_rules", "vmwrapper.landlock_rules"),
    ("vmwrapper.calls", "vmwrapper.calls"),
    ("vmwrapper.__main__", "vmwrapper.__main__"),
)
_SCRIPT = """\
#!/usr/bin/python3 -IS
# Made of virtshim's sources by `python -m vmwrapper.bundle`.
import marshal
import sys
from _frozen_importlib_external import MAGIC_NUMBER

COMPILED_FOR = {magic!r}
MODULES = {modules!r}

for name, source, compiled in MODULES:
    module = sys.modules[name] = type(sys)(name)
    is_ours = COMPILED_FOR == MAGIC_NUMBER
    code = marshal.loads(compiled) if is_ours else compile(source, name, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    package, _, own = name.rpartition(".")
    if package:
        setattr(sys.modules[package], own, module)
sys.modules["vmwrapper.__main__"].main()
"""


def build(magic: bytes = importlib.util.MAGIC_NUMBER) -> bytes:
    """The whole file. `magic`: that of the Python for the compiled code."""
    modules = [(name, source := _source(where), _compiled(name, source)) for name, where in _MODULES]
    return _SCRIPT.format(magic=magic, modules=modules).encode()


def _compiled(name: str, source: str) -> bytes:
    # Later versions than 2 share equal objects by chance, so the bytes would differ between runs.
    return marshal.dumps(compile(source, name, "exec", dont_inherit=True), 2)


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the source of {name} does not exist; install virtshim again")
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


def write(path: str) -> None:
    """Replaces `path` atomically, mode 0755, because a VM may be starting. Raises OSError.

    Leaves a file with the same bytes unchanged, because libvirt probes an emulator again if its time stamp changes.
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
