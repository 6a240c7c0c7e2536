"""The daemons reuse freed memory cheaply, and load no library that they do not use."""

import ctypes
import subprocess
import sys

import pytest

_CHURN = """
import resource
from tapmanager import heap
{keep}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks = [b"x" * (1 << 20) for _ in range(3)]
del blocks
before = faults()
for _ in range(50):
    blocks = [b"x" * (1 << 20) for _ in range(3)]
    del blocks
print(faults() - before)
"""


def _faults(keep: str) -> int:
    done = subprocess.run([sys.executable, "-c", _CHURN.format(keep=keep)], capture_output=True, check=True)
    return int(done.stdout)


_FREED = """
from tapmanager import heap
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
blocks = [bytearray(2048) for _ in range(10000)]
last = bytearray(2048)
del blocks
before = resident()
{call}
print(before - resident())
"""

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")


@needs_glibc
def test_freed_large_blocks_are_reused_without_being_cleared_again() -> None:
    """Of 4 KiB each: 150 MiB are 38400."""
    assert _faults("heap.keep_large_blocks()") < 2000 < _faults("heap.share_one_heap()")


@needs_glibc
def test_memory_that_was_freed_below_memory_in_use_goes_back_to_the_kernel() -> None:
    """20 MB are freed. KiB."""
    done = {
        call: int(
            subprocess.run([sys.executable, "-c", _FREED.format(call=call)], capture_output=True, check=True).stdout
        )
        for call in ("heap.share_one_heap()", "heap.return_freed_memory()")
    }
    assert done["heap.share_one_heap()"] < 2000 < 15000 < done["heap.return_freed_memory()"]


_LOADED = """
import sys
def loaded(*_):
    print(*(name for name, module in sys.modules.items() if module is not None))
    sys.exit()
"""
# The imports of a command before it reads the settings.
_COMMAND = """
import virtshim.cli.main
from virtshim.cli import {name}
{name}.load_settings = loaded
{name}.{call}
"""
# These programs have loaded everything when they refuse their arguments. The parser of the command line is not
# theirs.
_CLUSTER = """
import virtshim.cli.main
from virtshim.cli import cluster
from virtshim.model.errors import InvalidRequest
try:
    cluster.{call}
except InvalidRequest:
    loaded()
"""
_STARTS = {
    "virtshim serve": _COMMAND.format(name="serve", call="serve_command(None)"),
    "virtshim proxy": _COMMAND.format(name="proxy", call="proxy_command(None, None)"),
    "virtshim agent": _CLUSTER.format(call="agent_command('', '', '', None, None, '')"),
    "virtshim controller": _CLUSTER.format(call="controller_command('', '', '', 0, 0, signs=False)"),
    "tapmanager": "import tapmanager.__main__; loaded()",
    "virtshim-shares": "import tapmanager.shares.__main__; loaded()",
}
# Libraries that are installed beside the daemons, but serve other programs, few nodes, or some requests only.
_OPTIONAL = (
    "aiohttp", "alembic", "backports.zstd", "colorama", "compression.zstd", "cryptography", "greenlet", "lxml", "opentelemetry",
    "prometheus_client", "pycdlib", "pygments", "re2", "rich", "virtshim.cli.config", "virtshim.cli.diag", "virtshim.setup",
)  # fmt: skip
_VMS = ("libvirt", "sqlalchemy", "urllib3", "wsproto")
_VIRTSHIM = ("grpc", "pydantic", "structlog", "virtshim")
_RUNTIME = (
    "pydantic",
    "pyroute2",
    "virtshim.annotations.options",
    "virtshim.model.container",
    "virtshim.model.vm",
    "virtshim.store",
)
_UNUSED = {
    "virtshim agent": (*_OPTIONAL, *_RUNTIME, "libvirt", "sqlalchemy", "virtshim.cluster.controller"),
    "virtshim controller": (*_OPTIONAL, *_RUNTIME, "grpc", "libvirt", "sqlalchemy", "virtshim.cluster.agent"),
    "virtshim serve": (*_OPTIONAL, "pyroute2"),
    "virtshim proxy": (*_OPTIONAL, *_VMS, "pyroute2", "virtshim.images.service", "virtshim.recovery", "virtshim.store"),
    "tapmanager": (
        *_OPTIONAL, *_VMS, *_VIRTSHIM, "logging.handlers", "pyroute2.ethtool", "pyroute2.ipdb", "pyroute2.ndb", "sqlite3",
    ),
    "virtshim-shares": (
        *_OPTIONAL, *_VMS, *_VIRTSHIM, "asyncio", "difflib", "hashlib", "logging.handlers", "pickle", "pyroute2", "ssl",
        "tapmanager.attachments", "tapmanager.pod",
    ),
}  # fmt: skip


@pytest.mark.parametrize("daemon", _STARTS)
def test_a_daemon_loads_no_library_that_it_does_not_use(daemon: str) -> None:
    program = _LOADED + _STARTS[daemon]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert len(loaded) > 50
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{one}." for one in _UNUSED[daemon]))] == []
