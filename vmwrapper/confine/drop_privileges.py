"""How a child of root drops its user, network and resources before it reads untrusted files.

In a process with one thread, in this order: `own_namespaces` while it is still root, `bound`, `become`, `end_with` (the kernel
forgets it when the user changes), then `kernel.forbid_new_privileges`, landlock.py (QEMU's rules: landlock_rules.py),
seccomp.py.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import struct

from vmwrapper.confine import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_UNSHARE, _PRCTL, _CAPSET = 272, 157, 126
_PR_SET_PDEATHSIG = 1
# Effective, permitted and inheritable capabilities, 64 bits each.
_CAPABILITY_VERSION, _CAPABILITY_BYTES = 0x20080522, 24
_NAMESPACES = (("network", 0x40000000), ("ipc", 0x08000000), ("uts", 0x04000000))

_DESCRIPTORS = 64
# Threads of that user on the whole node. seccomp prevents them from starting processes.
_TASKS = 512
_FIRST_TO_GO = b"1000"


def own_namespaces() -> Sequence[str]:
    """Enters new, empty namespaces. Returns the new ones, because a service may not be allowed to make any."""
    held = []
    for name, flag in _NAMESPACES:
        try:
            kernel.syscall(_UNSHARE, flag)
        except OSError as exc:
            if exc.errno not in (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOSPC):
                raise
        else:
            held.append(name)
    return held


def bound(address_space: int, cpu_seconds: int) -> None:
    """Limits memory (bytes) and CPU time (seconds, then SIGXCPU). No file can be written, and if the node runs out of
    memory, this process is killed first. Raises OSError."""
    for which, soft, hard in (
        (resource.RLIMIT_AS, address_space, address_space),
        (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, _DESCRIPTORS, _DESCRIPTORS),
        (resource.RLIMIT_NPROC, _TASKS, _TASKS),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        ceiling = resource.getrlimit(which)[1]
        if ceiling == resource.RLIM_INFINITY:
            ceiling = hard
        resource.setrlimit(which, (min(soft, ceiling), min(hard, ceiling)))
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(_FIRST_TO_GO)
    except OSError:
        pass  # /proc is mounted read-only


def become(uid: int, gid: int) -> None:
    """Becomes this user for good, without other groups or capabilities. Does nothing if the caller is not root. Raises
    OSError."""
    if os.geteuid() != 0:
        return
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Drops all capabilities, even root's. If `kernel.forbid_new_privileges` follows, also for programs started by exec. Raises
    OSError."""
    this_process = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    kernel.syscall(_CAPSET, this_process, bytes(_CAPABILITY_BYTES))


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends; ends at once if it already has. Raises OSError."""
    kernel.syscall(_PRCTL, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
