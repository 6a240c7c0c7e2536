"""The child in which files of strangers are read: it gives up what it can, then does one thing. `main` does not return.

It is started as root, with the standard library and these modules alone, by `virtshim.images.confinement`. What is done:

    layers   layers come in by standard input, the disk in them goes out by standard output: nothing can be opened or sent
    judge    a file, handed over as a descriptor, is judged by its header; then the process becomes qemu-img
    tell     says what holds on this node

What it says is a claim: whoever took it over can say anything. virtshim takes from it a disk's bytes, which it digests itself,
a verdict, which it can only make worse, and texts.
"""

from __future__ import annotations

import os

from virtshim.images.confined import frames
from virtshim.images.confined.header import HEAD_BYTES, TAIL_BYTES, Unusable, judge_bytes
from vmwrapper.confine import kernel, landlock, rights, seccomp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import NoReturn

_QEMU_IMG = "qemu-img"
# Programs and their libraries; where a library looks for those, and what the C library or GnuTLS asks at its start.
_PROGRAMS = ("/usr", "/lib", "/lib64", "/bin")
_READ = ("/etc/ld.so.cache", "/etc/ld.so.preload", "/dev/null", "/dev/urandom", "/sys/devices/system/cpu")

# fmt: off
# All that Python does between two frames: read, write, memory, signals it handles, the end.
_UNPACKING = (
    0, 1, 3, 5, 8, 9, 10, 11, 12, 20, 25, 28,  # read write close fstat lseek mmap mprotect munmap brk writev mremap madvise
    13, 14, 15, 131, 202, 219,                 # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack futex restart_syscall
    96, 228, 318, 60, 231, 39, 186,            # gettimeofday clock_gettime getrandom exit exit_group getpid gettid
)
# Sockets of any kind, signals to others, another user's rights; the rest is `seccomp.REFUSED`.
_NOT_QEMU_IMGS = (seccomp.SOCKET, seccomp.SOCKETPAIR, seccomp.CONNECT, 49, 50, 200, 129, 297, 105, 106, 117, 119, 116)
# fmt: on
_KILL = 62


def main(arguments: Sequence[str]) -> NoReturn:
    """`arguments`: what is done; user, group, parent process; bytes of memory, seconds of CPU time; a descriptor, for judge."""
    do, (uid, gid, parent, memory, cpu_seconds, descriptor) = arguments[0], map(int, arguments[1:])
    serve = _serve_layers() if do == "layers" else None
    try:
        namespaces = rights.own_namespaces()
        rights.bound(memory, cpu_seconds)
        rights.become(uid, gid)
        rights.end_with(parent)
        kernel.forbid_new_privileges()
        version = landlock.restrict(_paths(descriptor) if do == "judge" else ())
        told = f"uid {os.getuid()}\nlandlock {version}\nnamespaces {' '.join(namespaces)}\n"
        seccomp.install(_qemu_img_filter() if do == "judge" else seccomp.only_these(_UNPACKING))
    except OSError as exc:
        _fail(f"its rights cannot be given up: {exc.strerror}")
    if serve is not None:
        serve(0, 1)
    elif do == "judge":
        _judge(descriptor)
    else:
        os.write(1, told.encode())
    os._exit(0)


def _serve_layers() -> Callable[[int, int], None]:
    """Loaded while files can be read, and only where it is needed."""
    from virtshim.images.confined.layers import serve

    return serve


def _qemu_img_filter() -> bytes:
    kill_itself = ((0, 0xFFFFFFFF, (os.getpid(),)),)
    only = {seccomp.CLONE: (seccomp.THREADS,), _KILL: (kill_itself,)}
    return seccomp.program((*seccomp.REFUSED, *_NOT_QEMU_IMGS), only, absent=(seccomp.CLONE3,))


def _fail(why: str) -> NoReturn:
    os.write(2, f"{why}\n".encode())
    os._exit(frames.CANNOT_CONFINE)


def _paths(descriptor: int) -> Iterable[tuple[str, int]]:
    yield f"/proc/self/fd/{descriptor}", landlock.READ
    for directory in (*_PROGRAMS, *os.get_exec_path()):
        yield directory, landlock.EXECUTE
    for path in _READ:
        yield path, landlock.READ


def _judge(descriptor: int) -> None:
    """One line, the header's verdict, is written before qemu-img sees the file; what follows it is qemu-img's."""
    size = os.fstat(descriptor).st_size
    head, tail = os.pread(descriptor, HEAD_BYTES, 0), os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
    try:
        found = judge_bytes(head, tail, size)
    except Unusable as exc:
        os.write(1, f"unusable {exc}\n".encode())
        return
    os.write(1, f"format {found}\n".encode())
    try:
        os.execvp(_QEMU_IMG, [_QEMU_IMG, "info", "--output=json", f"/proc/self/fd/{descriptor}"])  # noqa: S606
    except OSError as exc:
        _fail(f"cannot run {_QEMU_IMG}: {exc.strerror}; is its package installed?")
