"""Named network namespaces: makes them, removes them, and runs functions inside. Does not know their content.

unshare(2) and setns(2) change only the calling thread, and a thread that failed to return would do later work in the wrong
namespace. So both happen in a thread that ends right afterwards. Sockets, taps and netlink handles stay in the namespace
where they were made, and any thread may use them. (`IPRoute(netns=...)` forks, which is unsafe in a process with threads.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, Self, TypeVar

from tapmanager.errors import TapmanagerError, unavailable

T = TypeVar("T")
P = ParamSpec("P")

_CLONE_NEWNET = 0x40000000
_MS_BIND = 4096
_MS_REC = 16384
_MS_SHARED = 1 << 20
_MNT_DETACH = 2
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

PREFIX = "virtshim-"


def path_of(netns_dir: str, sandbox: str) -> str:
    """The namespace's path. It depends only on the id, so that clean-up needs no record. `sandbox`: a checked id, 64 hex
    digits."""
    return os.path.join(netns_dir, PREFIX + sandbox[:20])


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
    libc.unshare.argtypes = (ctypes.c_int,)
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
    return libc


def _check(result: int, doing: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")


def _mount(source: str, target: str, flags: int) -> None:
    _check(_libc().mount(source.encode(), target.encode(), b"none", flags, None), f"mount on {target}")


def prepare_dir(netns_dir: str) -> None:
    """Makes the directory a shared mount, as `ip netns add` does, so that programs in other mount namespaces see the mounts
    below it, and `ip netns exec` works. Raises OSError."""
    os.makedirs(netns_dir, mode=0o755, exist_ok=True)
    # iproute2 takes the same lock on the directory, which prevents two mounts on top of each other.
    lock = os.open(netns_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _mount("", netns_dir, _MS_SHARED | _MS_REC)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # EINVAL: not a mount point yet
                raise
            _mount(netns_dir, netns_dir, _MS_BIND | _MS_REC)
            _mount("", netns_dir, _MS_SHARED | _MS_REC)
    finally:
        os.close(lock)


def exists(path: str) -> bool:
    """Whether a network namespace is mounted at the path. A plain file that a crash left is not one."""
    try:
        return os.stat(path).st_dev == os.stat("/proc/self/ns/net").st_dev
    except FileNotFoundError:
        return False


def create(path: str) -> None:
    """Makes a new namespace at `path`, with lo up. Raises TapmanagerError if the path exists, and OSError."""
    _in_thread(lambda: create_and_enter(path))


def create_and_enter(path: str) -> None:
    """Like `create`, but the calling thread stays in the namespace, so it must end afterwards (see `Worker`)."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
    except FileExistsError as exc:
        raise TapmanagerError(
            "already-exists", f"{path} exists already; remove it with: ip netns del {os.path.basename(path)}"
        ) from exc
    try:
        _unshare_onto(path)
    except BaseException:
        os.unlink(path)
        raise


def _unshare_onto(path: str) -> None:
    _check(_libc().unshare(_CLONE_NEWNET), "unshare the network namespace")
    _bring_lo_up()
    _mount("/proc/thread-self/ns/net", path, _MS_BIND)


def _bring_lo_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        name, flags = struct.unpack_from("16sh", fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh22x", b"lo", 0)))
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", name, flags | _IFF_UP))


def delete(path: str) -> None:
    """Removes the mount and the file, if they exist. The namespace itself lives on while a process or descriptor uses it.

    Raises OSError.
    """
    while _libc().umount2(path.encode(), _MNT_DETACH) == 0:
        pass  # there may be two mounts on top of each other if two programs used the same name
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOENT):
        raise OSError(code, f"umount {path}: {os.strerror(code)}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def run_inside(path: str, work: Callable[[], T]) -> T:
    """Runs `work()` in the namespace at `path`. Returns its result or raises its exception. Raises TapmanagerError if the
    namespace is gone, or no thread can be started."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise TapmanagerError(
            "not-found", f"the network namespace {path} is gone; delete the pod to recreate it"
        ) from exc
    try:

        def enter() -> T:
            _check(_libc().setns(fd, _CLONE_NEWNET), f"setns to {path}")
            return work()

        return _in_thread(enter)
    finally:
        os.close(fd)


def run_in_each(work: Mapping[str, Callable[[], T]]) -> Mapping[str, T]:
    """`work`: a function for each namespace path. Each function runs in its namespace. One thread runs all of them, because a
    thread for each would cost more than the work. The result has no entry for a namespace that is gone, or whose function raises
    OSError."""

    def visit_all() -> Mapping[str, T]:
        found = {}
        for path, do in work.items():
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    _check(_libc().setns(fd, _CLONE_NEWNET), f"setns to {path}")
                finally:
                    os.close(fd)
                found[path] = do()
        return found

    return _in_thread(visit_all)


class Worker:
    """A thread that runs functions in turn until the end of the `with` block. It is for several functions in one namespace:
    the first function enters the namespace (`create_and_enter`)."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "in-netns")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread after its remaining functions. Until then the thread keeps its namespace alive. May be repeated."""
        self._thread.shutdown()

    def begin(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
        return self._thread.submit(work, *args, **options)

    def do(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return self.begin(work, *args, **options).result()


def _in_thread(work: Callable[[], T]) -> T:
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as exc:  # noqa: BLE001  handed to the caller, whatever it is
            done.set_exception(exc)

    thread = threading.Thread(target=run, name="in-netns")
    try:
        thread.start()
    except RuntimeError as exc:
        raise unavailable(
            f"cannot start a thread: {exc}; the node or the service has too many threads, or no memory"
        ) from exc
    thread.join()
    return done.result(timeout=0)
