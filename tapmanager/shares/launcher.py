"""A process that binds a VM's volumes together in mounts of its own, and becomes virtiofsd there.

    launcher.py check|serve ROOT < orders      as JSON, see `_Orders`

What can hang (a volume of a server that is gone) hangs here, where whoever asked can end it. On standard output a line tells
the number of each volume before it is looked at, and the last one, without an end, what fails: `{"kind", "message"}`; it ends
with 1 then. Nothing of what is mounted here is seen elsewhere, and all of it goes with the last process in here.
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
        # Of serve: what it becomes, the cgroup.procs files that it enters before it touches a volume, and how many files it may
        # have open.
        command: list[str]
        groups: list[str]
        open_files: int


# linux/mount.h, linux/sched.h; the first four are also mount_setattr's.
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC = 1, 2, 4, 8, 32, 4096, 16384
_PRIVATE, _SLAVE = 1 << 18, 1 << 19
_NEWNS = 0x00020000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Users of the guest reach volumes at their places, and not past the directories above these.
_ROOT_OPTIONS = b"mode=0700,size=4m"

_HUGETLBFS = 0x958458F6  # linux/magic.h

_KINDS = (
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISBLK, "a block device: ask for it by volumeDevices"),
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
    told = os.dup(1)  # closed by exec: that is how it is known to have become virtiofsd
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if what == "check":  # a volume may hang it; who would end it may be killed meanwhile
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        orders: _Orders = json.load(sys.stdin)
        if what == "serve":
            _write("/proc/self/oom_score_adj", b"0")  # who starts it is spared, it is not
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
    except ValueError:  # who gives the orders was killed
        pass
    return 1


def _limit_open_files(most: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except ValueError:  # who starts it may have fewer, and may not raise that
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _own_mounts() -> None:
    """The node's mounts as they are, and what becomes of them; nothing from here goes back."""
    _call("unshare", _libc.unshare(_NEWNS))
    _mount(None, "/", None, _REC | _SLAVE)


def _source(path: str) -> int:
    """What is there, over links, held open: what is mounted is what was looked at."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        mode = os.fstat(fd).st_mode
    except OSError as exc:
        if isinstance(exc, FileNotFoundError | NotADirectoryError):
            raise Refused("not-found", f"{path} is not there on the node; make it, or correct the volume") from exc
        raise Refused("unavailable", f"{path} cannot be reached: {exc.strerror}") from exc
    for is_it, words in _KINDS:
        if is_it(mode):
            raise Refused(
                "invalid", f"{path} is {words}; only directories and regular files can be shared with a guest"
            )
    if _file_system(fd) == _HUGETLBFS:  # its files are mapped, never written, as virtiofsd would
        raise Refused(
            "invalid",
            f"{path} is a hugetlbfs (an emptyDir with medium: HugePages, or one of the node's), whose files cannot be written "
            "by way of a share; remove the volume: resources.limits (hugepages-2Mi, hugepages-1Gi) have the guest's memory in "
            "huge pages, and the guest can mount a hugetlbfs of its own",
        )
    return fd


def _file_system(fd: int) -> int:
    """The magic number of the one that it is on: statfs(2), whose first field it is."""
    found = ctypes.create_string_buffer(256)
    _call("statfs", _libc.fstatfs(fd, found))
    number: int = struct.unpack_from("=L", found)[0]
    return number


def _assemble(root: str, mounts: list[_Mount], sources: list[int]) -> None:
    """One bind a volume, by its number, in a tmpfs over `root`."""
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
    """With all that is mounted below it: nobody in here opens a device or runs a program of a volume, and virtiofsd never has to.
    Touches none of these file systems (Linux 5.12)."""
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
