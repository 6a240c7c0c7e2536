"""Root's capabilities that this process gives up: its own are fewer than what its children, CNI plugins, may have.

A program that root starts has all that is in the bounding set again, so the plugins' list is that set; under NoNewPrivileges
only what is permitted to its parent as well, so that is the plugins' list, too, and those in effect are ours. systemd's unit
sets the same bounding set; `virtshim up` and a container do not.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Collection

log = logging.getLogger(__name__)

# By their numbers in linux/capability.h.
_NUMBERS = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6,
    "SETUID": 7, "SETPCAP": 8, "NET_BIND_SERVICE": 10, "NET_ADMIN": 12, "NET_RAW": 13, "IPC_LOCK": 14,
    "SYS_MODULE": 16, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_NICE": 23, "SYS_RESOURCE": 24, "PERFMON": 38, "BPF": 39,
}  # fmt: skip

# What CNI plugins may have: why each, the unit says.
PLUGINS = frozenset(_NUMBERS)
# Links, filters, taps; packet sockets; setns(2), mount(2); files and sockets of VMs; whose namespace a process is in; its
# oom_score_adj and cpuset; an end to a plugin that hangs and is another user by then.
OWN = frozenset(
    {
        "NET_ADMIN", "NET_RAW", "SYS_ADMIN", "CHOWN", "FOWNER", "DAC_OVERRIDE", "DAC_READ_SEARCH", "SYS_PTRACE", "SYS_RESOURCE",
        "SYS_NICE", "KILL",
    }
)  # fmt: skip

_VERSION_3 = 0x20080522
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_MOST = 64


def bits(names: Collection[str]) -> int:
    """The set of them as the kernel writes it."""
    return sum(1 << _NUMBERS[name] for name in names)


def give_up() -> None:
    """Once, before there are other threads: each has its own. What this process has not is no trouble. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, plugins = bits(OWN), bits(PLUGINS)
    for number in range(_MOST):
        has_it = not plugins >> number & 1 and libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1
        if has_it and libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            log.info("capabilities.kept number=%d error=%s", number, os.strerror(ctypes.get_errno()))
    header = ctypes.create_string_buffer(struct.pack("=Ii", _VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    _check(libc.capget(header, data), "capget")
    low_effective, low, _, high_effective, high, _ = struct.unpack("=6I", data.raw[:24])
    effective, permitted = (low_effective | high_effective << 32) & own, (low | high << 32) & plugins
    wanted = (effective & 0xFFFFFFFF, permitted & 0xFFFFFFFF, 0, effective >> 32, permitted >> 32, 0)
    _check(libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *wanted))), "capset")


def _check(result: int, doing: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")
