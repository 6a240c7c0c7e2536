"""A process that bind-mounts a VM's volumes in its own mount namespace, and then becomes virtiofsd.

    launcher.py check|serve ROOT < orders      as JSON, see `_Orders`

A volume whose server is gone may hang any access. It hangs only this process, which the caller can kill. On standard output, the
process prints the number of each volume before it checks the volume. If it fails, it prints `{"kind", "message"}` without a line
break, and exits with 1. Its mounts are not visible elsewhere, and they vanish with the last process in the namespace.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypedDict

    class _Mount(TypedDict):
        host_path: str
        readonly: bool
        follows: bool

    class _Orders(TypedDict):
        mounts: list[_Mount]
        # For serve: the command to become, the cgroup.procs files to enter before touching a volume, and the limit of open files.
        command: list[str]
        groups: list[str]
        open_files: int


# linux/mount.h, linux/sched.h; the first four are also mount_setattr's.
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC = 1, 2, 4, 8, 32, 4096, 16384
_PRIVATE, _SLAVE = 1 << 18, 1 << 19
_NEWNS = 0x00020000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Users of the guest can reach the volumes only at their paths, and cannot list the directory above them.
_ROOT_OPTIONS = b"mode=0700,size=4m"

_HUGETLBFS = 0x958458F6  # linux/magic.h

_KINDS = (
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISBLK, "a block device; request it with volumeDevices"),
    (stat.S_ISCHR, "a device node"),
)

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """`kind`: one of tapmanager.protocol.KINDS."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def main(argv: Sequence[str]) -> int:
    what, root = argv
    told = os.dup(1)  # exec closes it, which tells the caller that the process has become virtiofsd
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if what == "check":  # a volume may hang this process, and the caller that would kill it may die
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        orders: _Orders = json.load(sys.stdin)
        if what == "serve":
            _write("/proc/self/oom_score_adj", b"0")  # the caller is exempt from the OOM killer, this process is not
            for group in orders["groups"]:
                _write(group, b"0")
            _limit_open_files(orders["open_files"])
            _own_mounts()
        sources = []
        for number, mount in enumerate(orders["mounts"]):
            os.write(told, b"%d\n" % number)
            sources.append(_source(mount["host_path"]))
        if what == "check":
            return 0
        _assemble(root, orders["mounts"], sources)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(orders["command"][0], orders["command"])  # noqa: S606  becoming virtiofsd is what this program is for
    except Refused as exc:
        _tell(told, exc.kind, str(exc))
    except OSError as exc:
        _tell(told, "internal", f"{exc.filename or root}: {exc.strerror}")
    except ValueError:  # the caller was killed
        pass
    return 1


def _limit_open_files(most: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except ValueError:  # the caller may have a lower limit and no right to raise it
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _own_mounts() -> None:
    """Creates a mount namespace that follows later mounts of the node, but does not propagate its own mounts."""
    _call("unshare", _libc.unshare(_NEWNS))
    _mount(None, "/", None, _REC | _SLAVE)


def _source(path: str) -> int:
    """Opens the path, following links. The descriptor stays open, so that the checked file is the one that gets mounted."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        mode = os.fstat(fd).st_mode
    except OSError as exc:
        if isinstance(exc, FileNotFoundError | NotADirectoryError):
            raise Refused("not-found", f"{path} does not exist on the node; create it, or correct the volume") from exc
        raise Refused("unavailable", f"{path} cannot be reached: {exc.strerror}") from exc
    for is_it, words in _KINDS:
        if is_it(mode):
            raise Refused(
                "invalid", f"{path} is {words}; only directories and regular files can be shared with a guest"
            )
    if _file_system(fd) == _HUGETLBFS:  # its files can be mapped, but not written, which virtiofsd needs
        raise Refused(
            "invalid",
            f"{path} is a hugetlbfs (an emptyDir with medium: HugePages, or the node's own), whose files cannot be written "
            "through a share; remove the volume. resources.limits (hugepages-2Mi, hugepages-1Gi) put the guest's memory into "
            "huge pages, and the guest can mount its own hugetlbfs",
        )
    return fd


def _file_system(fd: int) -> int:
    """The magic number of the file system: the first field of statfs(2)."""
    found = ctypes.create_string_buffer(256)
    _call("statfs", _libc.fstatfs(fd, found))
    number: int = struct.unpack_from("=L", found)[0]
    return number


def _assemble(root: str, mounts: list[_Mount], sources: list[int]) -> None:
    """Bind-mounts each volume under its number, in a tmpfs over `root`."""
    _mount("virtshim", root, "tmpfs", _NOSUID | _NODEV | _NOEXEC, _ROOT_OPTIONS)
    for number, (mount, source) in enumerate(zip(mounts, sources, strict=True)):
        here = f"{root}/{number}"
        if stat.S_ISDIR(os.fstat(source).st_mode):
            os.mkdir(here, 0o755)
        else:
            os.close(os.open(here, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        try:
            _mount(f"/proc/self/fd/{source}", here, None, _BIND | _REC)
            _mount(None, here, None, (_SLAVE if mount["follows"] else _PRIVATE) | _REC)
            _restrict(here, readonly=mount["readonly"])
        except OSError as exc:
            raise Refused("internal", f"{mount['host_path']} cannot be bound: {exc.strerror}") from exc
    _mount(None, root, None, _REMOUNT | _RDONLY | _NOSUID | _NODEV | _NOEXEC)


def _restrict(here: str, *, readonly: bool) -> None:
    """Sets nosuid, nodev and noexec on the mount and all mounts below, because virtiofsd never opens devices or runs programs
    of a volume. Does not access these file systems (needs Linux 5.12)."""
    wanted = _NOSUID | _NODEV | _NOEXEC | (_RDONLY if readonly else 0)
    try:
        _set_attributes(here, wanted)
    except OSError as exc:
        if readonly or exc.errno != errno.ENOSYS:
            raise


def _set_attributes(here: str, wanted: int) -> None:
    attributes = struct.pack("=4Q", wanted, 0, 0, 0)
    _call(
        here,
        _libc.syscall(
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            os.fsencode(here),
            ctypes.c_uint(_AT_RECURSIVE),
            attributes,
            ctypes.c_size_t(len(attributes)),
        ),
    )


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: bytes | None = None) -> None:
    words = (None if source is None else os.fsencode(source), os.fsencode(target), kind.encode() if kind else None)
    _call(target, _libc.mount(*words, ctypes.c_ulong(flags), data))


def _call(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _tell(fd: int, kind: str, message: str) -> None:
    os.write(fd, json.dumps({"kind": kind, "message": message}).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
