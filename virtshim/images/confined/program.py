"""The child that reads untrusted files: it drops its rights, then does one task. `main` does not return.

`virtshim.images.confinement` starts it as root, with only the standard library, zstd, zlib-ng and these modules. The tasks:

    layers      reads layers from standard input and writes their disk to standard output; can open and send nothing
    judge       judges the header of a file, which it gets as a descriptor, then becomes qemu-img
    raw, qcow2  copies a file of that format, judged before, to a block device with qemu-img; gets both as descriptors. It
                stays root without capabilities, because root owns the device. Without Landlock it refuses to
                copy (rules: `_paths` below; those of a VM's QEMU: vmwrapper/landlock_rules.py)
    tell        reports which restrictions work on this node

A hostile file may have taken the child over, so virtshim does not trust its output. virtshim digests the disk's bytes
itself, lets qemu-img confirm the verdict, and treats texts as texts.
"""

from __future__ import annotations

import os
import sys

from virtshim.images.confined import frames
from virtshim.images.confined.header import verdict
from vmwrapper.confine import drop_privileges, kernel, landlock, seccomp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import NoReturn

_QEMU_IMG = "qemu-img"
# Directories of programs and libraries, and the files that the loader, the C library and GnuTLS read at start.
_PROGRAM_DIRECTORIES = ("/usr", "/lib", "/lib64", "/bin")
_READABLE_FILES = ("/etc/ld.so.cache", "/etc/ld.so.preload", "/dev/null", "/dev/urandom", "/sys/devices/system/cpu")

# fmt: off
# The system calls that Python needs between two frames: read, write, memory, signal handlers, exit.
_UNPACKING_CALLS = (
    0, 1, 3, 5, 8, 9, 10, 11, 12, 20, 25, 28,  # read write close fstat lseek mmap mprotect munmap brk writev mremap madvise
    13, 14, 15, 131, 202, 219,                 # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack futex restart_syscall
    96, 228, 318, 60, 231, 39, 186,            # gettimeofday clock_gettime getrandom exit exit_group getpid gettid
)
# Refused for qemu-img besides `seccomp.REFUSED`: sockets, signals to other processes, changes of user.
_REFUSED_TO_QEMU_IMG = (seccomp.SOCKET, seccomp.SOCKETPAIR, seccomp.CONNECT, 49, 50, 200, 129, 297, 105, 106, 117, 119, 116)
# Refused because qemu-img may run as root: chmod, chown, setxattr, removexattr and kin.
_REFUSED_TO_ROOT = (90, 91, 268, 452, 92, 93, 94, 260, 188, 189, 190, 197, 198, 199)
# fmt: on
_KILL = 62
_COPIES = ("raw", "qcow2")


def main(arguments: Sequence[str]) -> NoReturn:
    """`arguments`: the task; the directory of zstd and zlib-ng; user, group, parent process; bytes of memory, seconds of CPU
    time; the descriptors of a file and a device, and the offset in the device at which the copy begins."""
    task, packages = arguments[:2]
    uid, gid, parent, memory, cpu_seconds, descriptor, target, at = map(int, arguments[2:])
    serve = _serve_layers(packages) if task == "layers" else None
    is_qemu_img = task == "judge" or task in _COPIES
    try:
        namespaces = drop_privileges.own_namespaces()
        drop_privileges.bound(memory, cpu_seconds)
        drop_privileges.become(uid, gid)
        drop_privileges.drop_capabilities()
        drop_privileges.end_with(parent)
        kernel.forbid_new_privileges()
        version = landlock.restrict(_paths(descriptor, target) if is_qemu_img else ())
        report = f"uid {os.getuid()}\nlandlock {version}\nnamespaces {' '.join(namespaces)}\n"
        seccomp.install(_qemu_img_filter() if is_qemu_img else seccomp.only_these(_UNPACKING_CALLS))
    except OSError as exc:
        _fail(f"it cannot drop its rights: {exc.strerror}")
    if task in _COPIES and not version:
        _fail("the kernel has no Landlock (Linux 5.13 or newer, landlock among the words of lsm= on its command line)")
    if serve is not None:
        try:
            serve(0, 1)
        except EOFError:  # virtshim is gone
            os._exit(1)
    elif task in _COPIES:
        _copy(task, descriptor, target, at)
    elif task == "judge":
        _judge(descriptor)
    else:
        os.write(1, report.encode())
    os._exit(0)


def _serve_layers(packages: str) -> Callable[[int, int], None]:
    """Imports `serve` now, because the child cannot open files later."""
    sys.path.append(packages)
    from virtshim.images.confined.layers import serve

    sys.path.remove(packages)
    return serve


def _qemu_img_filter() -> bytes:
    kill_itself = ((0, 0xFFFFFFFF, (os.getpid(),)),)
    only = {seccomp.CLONE: (seccomp.THREADS,), _KILL: (kill_itself,)}
    return seccomp.program((*seccomp.REFUSED, *_REFUSED_TO_QEMU_IMG, *_REFUSED_TO_ROOT), only, absent=(seccomp.CLONE3,))


def _fail(why: str) -> NoReturn:
    os.write(2, f"{why}\n".encode())
    os._exit(frames.CANNOT_CONFINE)


def _paths(descriptor: int, target: int) -> Iterable[tuple[str, int]]:
    yield f"/proc/self/fd/{descriptor}", landlock.READ
    yield f"/proc/self/fd/{target}", landlock.DEVICE
    for directory in (*_PROGRAM_DIRECTORIES, *os.get_exec_path()):
        yield directory, landlock.EXECUTE
    for path in _READABLE_FILES:
        yield path, landlock.READ


def _judge(descriptor: int) -> None:
    """Writes the header's verdict as one line before qemu-img opens the file. qemu-img's output follows it."""
    line, is_usable = verdict(descriptor)
    os.write(1, f"{line}\n".encode())
    if is_usable:
        _become_qemu_img("info", "--output=json", f"/proc/self/fd/{descriptor}")


def _copy(kind: str, descriptor: int, target: int, at: int) -> NoReturn:
    """Reads only the file itself, even if it names a backing file. Writes the whole disk, including empty parts."""
    below = "" if kind == "raw" else ', "backing": null'
    file = f'{{"driver": "file", "filename": "/proc/self/fd/{descriptor}"}}'
    device = f"driver=raw,offset={at},file.driver=host_device,file.filename=/proc/self/fd/{target}"
    _become_qemu_img(
        "convert", "-n", f'json:{{"driver": "{kind}", "file": {file}{below}}}', "--target-image-opts", device
    )


def _become_qemu_img(*words: str) -> NoReturn:
    try:
        os.execvp(_QEMU_IMG, [_QEMU_IMG, *words])  # noqa: S606
    except OSError as exc:
        _fail(f"cannot run {_QEMU_IMG}: {exc.strerror}; is its package installed?")
