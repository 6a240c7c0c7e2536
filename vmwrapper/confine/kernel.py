"""System calls for which Python has no function, on x86-64. Only uses ctypes, because vmwrapper loads this at each VM's start.

This package needs no privileges, and its effects cannot be undone. They apply to the calling thread and what it starts
afterwards, so call it in a process with one thread, before exec.
"""

from __future__ import annotations

import ctypes
import errno
import os

_PRCTL = 157
_PR_SET_NO_NEW_PRIVS = 38
_PR_SCHED_CORE = 62
_PR_SCHED_CORE_GET, _PR_SCHED_CORE_CREATE = 0, 1
_ONE_THREAD, _THREAD_GROUP = 0, 1

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Passes integers as unsigned long, bytes as a pointer to them, None as the null pointer. Raises OSError."""
    words = [ctypes.c_ulong(word) if isinstance(word, int) else ctypes.c_char_p(word) for word in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def pointer_to(data: bytes) -> bytes:
    """A pointer for a structure; valid as long as `data` exists."""
    return bytes(ctypes.c_char_p(data))


def forbid_new_privileges() -> None:
    """From now on no exec grants rights (set-user-ID, file capabilities). landlock.py and seccomp.py require this."""
    syscall(_PRCTL, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def can_share_no_core() -> bool:
    """Whether the kernel has core scheduling."""
    try:
        syscall(_PRCTL, _PR_SCHED_CORE, _PR_SCHED_CORE_GET, 0, _ONE_THREAD, 0)
    except OSError as exc:
        return exc.errno == errno.EFAULT  # with core scheduling, the null pointer for the answer fails
    return True


def share_no_core() -> None:
    """No other task may run on a core's sibling threads while this process runs. Raises OSError: ENODEV without sibling threads,
    EINVAL without core scheduling in the kernel."""
    syscall(_PRCTL, _PR_SCHED_CORE, _PR_SCHED_CORE_CREATE, 0, _THREAD_GROUP, 0)
