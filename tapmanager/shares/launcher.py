"""A process that bind-mounts a VM's volumes in its own mount namespace, and then becomes virtiofsd; or that enters a pod's
network namespace, and then becomes passt.

    launcher.py check|serve ROOT < orders      as JSON, see `_Orders`
    launcher.py network ROOT < orders          as JSON, see `_NetworkOrders`

A volume whose server is gone may hang any access. It hangs only this process, which the caller can kill. On standard output, the
process prints the number of each volume before it checks the volume. When passt is ready, it goes to the background; if it does
not start, it writes the reason to the same pipe. If the launcher fails, it prints `{"kind", "message"}` without a line break, and
exits with 1. Its mounts are not visible elsewhere, and they vanish with the last process in the namespace.
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

    class _NetworkOrders(TypedDict):
        # passt and its words; see passt.Network for the pod's part. `folder`: where passt makes its socket.
        program: str
        command: list[str]
        groups: list[str]
        open_files: int
        folder: str
        netns: str
        inode: int
        uid: int
        families: list[int]
        tcp: list[int]
        udp: list[int]


# linux/mount.h, linux/sched.h; the first four are also mount_setattr's.
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC = 1, 2, 4, 8, 32, 4096, 16384
_PRIVATE, _SLAVE = 1 << 18, 1 << 19
_NEWNS, _NEWNET = 0x00020000, 0x40000000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38  # linux/prctl.h
# passt's socket is here for passt alone, because the AppArmor profiles of distributions allow it no other place.
PASSTS_FOLDER = "/tmp"  # noqa: S108  in a mount namespace of its own
_PORTS, _PING = "/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/sys/net/ipv4/ping_group_range"
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
    report = os.dup(1)  # exec closes it, which tells the caller that the process has become virtiofsd
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if what == "check":  # a volume may hang this process, and the caller that would kill it may die
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if what == "network":
            _become_passt(json.load(sys.stdin), report)
        orders: _Orders = json.load(sys.stdin)
        if what == "serve":
            _settle(orders["groups"], orders["open_files"])
        sources = []
        for number, mount in enumerate(orders["mounts"]):
            os.write(report, b"%d\n" % number)
            sources.append(_source(mount["host_path"]))
        if what == "check":
            return 0
        _assemble(root, orders["mounts"], sources)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(orders["command"][0], orders["command"])  # noqa: S606  becoming virtiofsd is what this program is for
    except Refused as exc:
        _write_report(report, exc.kind, str(exc))
    except OSError as exc:
        _write_report(report, "internal", f"{exc.filename or root}: {exc.strerror}")
    except ValueError:  # the caller was killed
        pass
    return 1


def _settle(groups: list[str], open_files: int) -> None:
    _write("/proc/self/oom_score_adj", b"0")  # the caller is exempt from the OOM killer, this process is not
    for group in groups:
        _write(group, b"0")
    _limit_open_files(open_files)
    _own_mounts()


def _become_passt(orders: _NetworkOrders, report: int) -> None:
    """Returns only by an exception. passt gets no right of root, and its own folder."""
    _settle(orders["groups"], orders["open_files"])
    _enter(orders["netns"], orders["inode"])
    _let_passt(orders)
    _mount(orders["folder"], PASSTS_FOLDER, None, _BIND)
    os.setgroups([])
    os.setgid(orders["uid"])
    os.setuid(orders["uid"])
    _call("no_new_privs", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for family in orders["families"]:
        for name in ("tcp", "udp"):
            for port in orders[name]:
                _try_port(family, name, port)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(report, 2)
    os.execv(orders["program"], orders["command"])  # noqa: S606  becoming passt is what this program is for


def _enter(path: str, inode: int) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = -1
    if fd < 0 or os.fstat(fd).st_ino != inode or os.fstat(fd).st_dev != os.stat("/proc/self/ns/net").st_dev:
        raise Refused(
            "failed-precondition", f"{path} is not the pod's network namespace any more; it needs a new sandbox"
        )
    _call(path, _libc.setns(fd, _NEWNET))
    os.close(fd)


def _let_passt(orders: _NetworkOrders) -> None:
    """Allows passt its ports and pings. Changes no more of the pod's sysctls than that needs."""
    lowest = min([*orders["tcp"], *orders["udp"]], default=65536)
    if lowest < int(_read(_PORTS)):
        _write(_PORTS, str(lowest).encode())
    first, last = (int(word) for word in _read(_PING).split())
    group = orders["uid"]
    if first > last:  # nobody
        first = last = group
    if not first <= group <= last:
        first, last = min(first, group), max(last, group)
    _write(_PING, f"{first} {last}".encode())


def _try_port(family: int, name: str, port: int) -> None:
    """passt itself only complains if it gets a port of neither address family."""
    import socket  # virtiofsd's start does not wait for it

    kind = socket.SOCK_STREAM if name == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, kind) as tried:
        if family == socket.AF_INET6:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            if name == "tcp":  # closed connections may still have the port; two UDP sockets would share it
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("", port))
            if name == "tcp":
                tried.listen()
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise Refused("internal", f"port {port}/{name} of the pod: {exc.strerror}") from exc
            raise Refused(
                "failed-precondition",
                f"port {port}/{name} of the pod is held by another of its containers, so the VM cannot have it; give one of them "
                "another port, or leave it out of the VM's (annotation virtshim.io/ports)",
            ) from exc


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


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _write_report(fd: int, kind: str, message: str) -> None:
    os.write(fd, json.dumps({"kind": kind, "message": message}).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
