"""Writes vmwrapper as one executable file: `python -m vmwrapper.bundle PATH`.

QEMU's user can read neither root's home nor a virtual environment. So the file contains everything and runs under the
system's Python, isolated (-I: no user site, no PYTHON* variables) and without site packages (-S). The same sources and the
same Python give the same bytes.

Each VM's start waits for it. So it is a script with compiled modules: loading runpy and zipimport for a zip archive would take as
long as starting Python. The modules are base64 strings, because Python parses the whole file at each start, and takes more than a
millisecond longer for sources and code as literals. A module runs when it is imported first.

The sources are included too, compressed, for a system's Python of another version, which compiles them.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import marshal
import os
import sys
import tempfile
import zlib
from types import CodeType

# Name for imports -> source.
_MODULES = {
    "json": "vmwrapper.json_core",
    "socket": "vmwrapper.socket_core",
    "ctypes": "vmwrapper.ctypes_core",
    "tapmanager": "tapmanager",
    "tapmanager.protocol": "tapmanager.protocol",
    "vmwrapper": "vmwrapper",
    "vmwrapper.argv_plan": "vmwrapper.argv_plan",
    "vmwrapper.confine": "vmwrapper.confine",
    "vmwrapper.confine.kernel": "vmwrapper.confine.kernel",
    "vmwrapper.confine.landlock": "vmwrapper.confine.landlock",
    "vmwrapper.confine.seccomp": "vmwrapper.confine.seccomp",
    "vmwrapper.landlock_rules": "vmwrapper.landlock_rules",
    "vmwrapper.calls": "vmwrapper.calls",
    "vmwrapper.__main__": "vmwrapper.__main__",
}
_OLDEST_PYTHON = (3, 10)
_PACKAGES = ("tapmanager", "vmwrapper", "vmwrapper.confine")
_SCRIPT = """\
#!/usr/bin/python3 -IS
# Made of virtshim's sources by `python -m vmwrapper.bundle`.
import marshal
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER
from binascii import a2b_base64

COMPILED_FOR = {magic!r}
COMPILED = {compiled!r}
SOURCES = {sources!r}

if COMPILED_FOR == MAGIC_NUMBER:
    CODE = marshal.loads(a2b_base64(COMPILED))
else:
    if sys.version_info < {oldest!r}:
        sys.exit("virtshim vmwrapper: cannot start the virtual machine: /usr/bin/python3 is Python %d.%d, and vmwrapper needs "
                 "Python {oldest[0]}.{oldest[1]} or newer" % sys.version_info[:2])
    import zlib
    CODE = marshal.loads(zlib.decompress(a2b_base64(SOURCES)))


class Modules:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Modules, is_package=name in {packages!r}) if name in CODE else None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        code = CODE[module.__name__]
        if isinstance(code, str):
            code = compile(code, module.__name__, "exec", dont_inherit=True)
        exec(code, module.__dict__)


sys.meta_path.insert(0, Modules)
from vmwrapper.__main__ import main

main()
"""


def build(magic: bytes = importlib.util.MAGIC_NUMBER, oldest: tuple[int, int] = _OLDEST_PYTHON) -> bytes:
    """The whole file. `magic`: that of the Python for the compiled code. `oldest`: the first Python that can run the sources."""
    sources = {name: _source(where) for name, where in _MODULES.items()}
    compiled = {name: compile(source, name, "exec", dont_inherit=True) for name, source in sources.items()}
    return _SCRIPT.format(
        magic=magic,
        oldest=oldest,
        compiled=_text(_marshalled(compiled)),
        sources=_text(zlib.compress(_marshalled(sources))),
        packages=_PACKAGES,
    ).encode()


def _marshalled(modules: dict[str, str] | dict[str, CodeType]) -> bytes:
    # Later versions than 2 share equal objects by chance, so the bytes would differ between runs.
    return marshal.dumps(modules, 2)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


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
