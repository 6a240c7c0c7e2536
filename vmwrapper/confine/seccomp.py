"""seccomp: refuses system calls from now on, in this process and the programs that it becomes.

It lists refused calls, not allowed ones, because QEMU adds its own list, and a new libc must not end VMs. When a kernel
adds calls of the kinds in `REFUSED`, they must be added here.
"""

from __future__ import annotations

import errno
import struct

from vmwrapper.confine import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    # Number of an argument, a mask for its bits, and the allowed values.
    Condition = tuple[int, int, Sequence[int]]
    # All conditions must hold.
    Case = Sequence[Condition]

_SECCOMP, _SET_MODE_FILTER = 317, 1

_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_LOAD, _AND, _JUMP, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
# Offsets in struct seccomp_data. Only the lower half of arguments is checked, because the kernel uses 32 bits of them.
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
# Kills the process at a call of another architecture; then loads the call's number.
_BEGIN = (
    (_LOAD, 0, 0, _ARCHITECTURE_AT), (_JUMP_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER_AT),
)  # fmt: skip

# fmt: off
# Neither running a guest nor reading a file needs these.
REFUSED: Sequence[int] = (
    101, 310, 311, 312, 440,            # ptrace, process_vm_readv, process_vm_writev, kcmp, process_madvise
    424, 434, 438, 448,                 # pidfd_send_signal, pidfd_open, pidfd_getfd, process_mrelease
    248, 249, 250,                      # add_key, request_key, keyctl
    321, 298, 323, 300,                 # bpf, perf_event_open, userfaultfd, fanotify_init
    425, 426, 427,                      # io_uring: its operations bypass seccomp
    165, 166, 155, 161, 272, 308,       # mount, umount2, pivot_root, chroot, unshare, setns
    428, 429, 430, 431, 432, 433, 442,  # open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr
    303, 304,                           # name_to_handle_at, open_by_handle_at
    246, 320, 175, 313, 176,            # kexec_load, kexec_file_load, init_module, finit_module, delete_module
    167, 168, 169, 163, 179, 443,       # swapon, swapoff, reboot, acct, quotactl, quotactl_fd
    103, 172, 173, 134, 153, 154, 212,  # syslog, iopl, ioperm, uselib, vhangup, modify_ldt, lookup_dcookie
    159, 164, 227, 305, 170, 171,       # adjtimex, settimeofday, clock_settime, clock_adjtime, sethostname, setdomainname
    29, 30, 31, 67,                     # shmget, shmat, shmctl, shmdt
    64, 65, 66, 220, 68, 69, 70, 71,    # semget, semop, semctl, semtimedop, msgget, msgsnd, msgrcv, msgctl
    240, 256, 279, 447,                 # mq_open, migrate_pages, move_pages, memfd_secret
    57, 58, 322,                        # fork, vfork, execveat
)
# fmt: on

SOCKET, CONNECT, SOCKETPAIR, CLONE, CLONE3 = 41, 42, 53, 56, 435

UNIX, NETLINK = 1, 16
STREAM, RAW = 1, 3
_TYPE_BITS = 0xF  # above them are SOCK_CLOEXEC and SOCK_NONBLOCK

_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000  # user, pid, net, ipc, uts, cgroup, mount

_ALL_BITS = 0xFFFFFFFF
_KOBJECT_UEVENT = 15

UNIX_STREAMS: Case = ((0, _ALL_BITS, (UNIX,)), (1, _TYPE_BITS, (STREAM,)))
# The kernel's device events.
DEVICE_NEWS: Case = ((0, _ALL_BITS, (NETLINK,)), (1, _TYPE_BITS, (RAW,)), (2, _ALL_BITS, (_KOBJECT_UEVENT,)))
THREADS: Case = ((0, _CLONE_THREAD | _CLONE_NEW, (_CLONE_THREAD,)),)


def program(refused: Iterable[int], only: Mapping[int, Sequence[Case]], absent: Iterable[int] = ()) -> bytes:
    """A filter in the kernel's format. `refused` calls fail with EPERM, and so do calls in `only` outside their cases. `absent`
    calls fail as on a kernel that lacks them, so that libc falls back. A call of another architecture kills the process."""
    code = [*_BEGIN, (_JUMP_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number in absent:
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number, cases in only.items():
        block = [instruction for case in cases for instruction in _allowing(case)]
        block.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
        code += [(_JUMP_EQUAL, 0, len(block), number), *block]
    for number in refused:
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def only_these(allowed: Iterable[int]) -> bytes:
    """A filter that refuses all other calls with EPERM, for code whose calls are all known. Otherwise as `program`."""
    code = list(_BEGIN)
    for number in allowed:
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _allowing(case: Case) -> list[tuple[int, int, int, int]]:
    """Instructions that allow the call if the case holds, and otherwise continue."""
    code: list[tuple[int, int, int, int]] = [(_RETURN, 0, 0, _ALLOW)]
    for argument, bits, values in reversed(case):
        # A matching value jumps past the other values, and past the jump out of this case after them.
        equal = [(_JUMP_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
        code = [
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),
            (_AND, 0, 0, bits),
            *equal,
            (_JUMP, 0, 0, len(code)),
            *code,
        ]
    return code


def install(filter_program: bytes) -> None:
    """Installs the filter for good. Call `kernel.forbid_new_privileges` first. Raises OSError: EINVAL without seccomp filters in
    the kernel."""
    described = struct.pack("=H6x", len(filter_program) // 8) + kernel.pointer_to(filter_program)
    kernel.syscall(_SECCOMP, _SET_MODE_FILTER, 0, described)
