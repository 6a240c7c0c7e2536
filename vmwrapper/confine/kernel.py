"""System calls that Python has no function for, by ctypes alone: vmwrapper loads this at each VM's start. x86-64.

What this package does needs no privilege, and none is got back. It holds for the calling thread and what that starts from then
on: call it in a process with one thread, before exec.
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
    """Integers as the kernel's unsigned long, bytes as a pointer to them, None as the null pointer. Raises OSError."""
    words = [ctypes.c_ulong(word) if isinstance(word, int) else ctypes.c_char_p(word) for word in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def pointer_to(data: bytes) -> bytes:
    """As it lies in a structure; good as long as `data` is there."""
    return bytes(ctypes.c_char_p(data))


def forbid_new_privileges() -> None:
    """No exec gives rights (set-user-ID, file capabilities) from here on. Landlock and seccomp ask for it."""
    syscall(_PRCTL, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def can_share_no_core() -> bool:
    """Whether `share_no_core` has something to do here."""
    try:
        syscall(_PRCTL, _PR_SCHED_CORE, _PR_SCHED_CORE_GET, 0, _ONE_THREAD, 0)
    except OSError as exc:
        return exc.errno == errno.EFAULT  # where it is there, it has nowhere to write its answer
    return True


def share_no_core() -> None:
    """No other task runs on the sibling threads of a core while this process does. Raises OSError: ENODEV where cores have no
    siblings, EINVAL where the kernel has no core scheduling."""
    syscall(_PRCTL, _PR_SCHED_CORE, _PR_SCHED_CORE_CREATE, 0, _THREAD_GROUP, 0)
