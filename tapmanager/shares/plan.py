"""Parses requests for share daemons, and builds the command line of virtiofsd's C and Rust version. Pure. passt: see `passt`."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tapmanager.fields import BadField, Json, each, flag, refuse_unknown, text

# Paths of virtiofsd in distributions: the Rust version, or the old C version of QEMU.
PROGRAMS = ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd", "/usr/lib/virtiofsd", "/usr/bin/virtiofsd")
MOST_MOUNTS = 256
_LONGEST_PATH = 4095
# virtiofsd's own limit of open files, and the share of the node's limit. Each file that a guest has looked up counts.
_MOST_OPEN, _SHARE_OF_NODES = 1_000_000, 8
# Names in the directory of a share: the socket for QEMU; the mount point of the volumes, in the daemon's namespace; the file with
# the path of the daemon's cgroup.
SOCKET, ROOT, GROUP = "fs.sock", "root", "group"
_NAME = re.compile(r"[0-9a-f]{20}")


@dataclass(frozen=True, slots=True)
class SharedMount:
    """A volume. `follows`: the guest sees mounts that the node makes below it later."""

    host_path: str
    readonly: bool = False
    follows: bool = False

    @classmethod
    def from_json(cls, obj: Json, where: str) -> SharedMount:
        refuse_unknown(obj, cls.__slots__, where)
        path = text(obj, "host_path", where)
        if not path.startswith("/") or len(path.encode()) > _LONGEST_PATH:
            raise BadField(f"{where}.host_path: must be an absolute path of at most {_LONGEST_PATH} bytes")
        return cls(path, flag(obj, "readonly", where), flag(obj, "follows", where))


def mounts_of(args: Json) -> Sequence[SharedMount]:
    """Raises BadField."""
    found = each(args, "mounts", "args", SharedMount.from_json)
    if len(found) > MOST_MOUNTS:
        raise BadField(f"args.mounts: {len(found)} volumes; a virtual machine has at most {MOST_MOUNTS}")
    return found


def parent_of(args: Json) -> str:
    """The parent directory of all shares. Raises BadField."""
    path = text(args, "directory", "args")
    if not path.startswith("/") or os.path.normpath(path) != path or path == "/" or not path.isprintable():
        raise BadField(f"args.directory: not a plain absolute path: {path[:200]!r}")
    return path


def name_of(args: Json) -> str:
    """Raises BadField."""
    name = text(args, "name", "args")
    if not is_name(name):
        raise BadField(f"args.name: must be 20 hex digits: {name[:80]!r}")
    return name


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def is_rust(version: str) -> bool:
    """Whether `virtiofsd --version` is that of the Rust version: `virtiofsd 1.10.0`. QEMU's prints `virtiofsd version 7.2.22
    (...)`."""
    return re.match(r"virtiofsd \d", version) is not None


def command_line(program: str, socket: int, root: str, *, rust: bool) -> Sequence[str]:
    """The command line of virtiofsd. It serves `root` to the first client of the listening `socket`, and ends with that
    connection. It runs as root, so that chown, 0600 files and setgid directories work in the guest as in a container; its
    other rights are removed. It keeps its limit of open files."""
    words = (program, f"--fd={socket}", "--rlimit-nofile=0")
    both = ("sandbox=namespace", "modcaps=-mknod:-setfcap", "cache=auto")
    if rust:
        return (*words, f"--shared-dir={root}", "--seccomp=kill", "--announce-submounts", *(f"--{one}" for one in both))
    options = (f"source={root}", "announce_submounts", *both)
    return (*words, *(word for option in options for word in ("-o", option)))


def most_open_files(of_the_node: int) -> int:
    """How many files a VM's volumes may keep open. `of_the_node`: the limit of all processes together."""
    return min(_MOST_OPEN, of_the_node // _SHARE_OF_NODES)


def serves(command: Sequence[str], root: str) -> bool:
    """Whether this command line is that of the share's daemon, or of the launcher that becomes it."""
    return any(word in (root, f"source={root}", f"--shared-dir={root}") for word in command)
