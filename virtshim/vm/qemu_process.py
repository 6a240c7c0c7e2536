"""Finds a VM's QEMU process and reads its usage from /proc; knows libvirt's directories. Asks neither libvirt nor QEMU, so it
works if they hang.

It does not read smaps_rollup, which walks the page tables of the whole guest under the lock that QEMU needs for page faults.
The sums in `status` cost nothing.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import uuid

from virtshim.model.usage import ProcessUsage

_KIB = 1024
_FIELD = re.compile(r"^(\w+):\s+(\d+)", re.MULTILINE)
_NOFILE = re.compile(r"^Max open files\s+(\S+)", re.MULTILINE)


def pid_directory(uri: str) -> str:
    """Where libvirt's QEMU driver writes `<VM's name>.pid`; "" for drivers that do not run QEMU as root."""
    scheme, _, rest = uri.partition("://")
    path, _, options = rest.partition("?")
    if scheme == "qemu" and path == "/embed" and options.startswith("root="):
        return f"{options.removeprefix('root=')}/run/qemu"
    return "/run/libvirt/qemu" if scheme.startswith("qemu") and path == "/system" else ""


def state_directory(uri: str) -> str:
    """Where that driver has a directory for each running VM, with the monitor's socket; "" as in `pid_directory`."""
    return re.sub("^/run/libvirt/qemu$", "/var/lib/libvirt/qemu", re.sub("/run/qemu$", "/lib/qemu", pid_directory(uri)))


def log_directory(uri: str) -> str:
    """Where that driver, or virtlogd, writes `<VM's name>.log`; "" as in `pid_directory`."""
    return re.sub("^/run/libvirt/qemu$", "/var/log/libvirt/qemu", re.sub("/run/qemu$", "/log/qemu", pid_directory(uri)))


def remove_logs(directory: str, name: str) -> None:
    """Removes a VM's logs, also rotated ones, because libvirt keeps them for ever. Raises OSError."""
    log = os.path.join(glob.escape(directory), f"{glob.escape(name)}.log")
    for path in (*glob.glob(log), *glob.glob(f"{log}.[0-9]*")):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def find(directory: str, name: str, domain: uuid.UUID) -> int | None:
    """The process id of the VM's QEMU. A stale file may name another process, so the command line must have the VM's UUID."""
    try:
        with open(os.path.join(directory, f"{name}.pid"), encoding="ascii") as file:
            pid = int(file.read())
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if str(domain).encode() in words else None


def usage_of(pid: int) -> ProcessUsage | None:
    """None if the process has just ended."""
    try:
        return _parsed(
            pid,
            status=_text(f"/proc/{pid}/status"),
            stat=_text(f"/proc/{pid}/stat"),
            limits=_text(f"/proc/{pid}/limits"),
            open_to=_open_to(f"/proc/{pid}/fd"),
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        )
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _parsed(
    pid: int, *, status: str, stat: str, limits: str, open_to: list[str] | None, descriptors: int
) -> ProcessUsage:
    """Raises KeyError, ValueError or IndexError for a zombie."""
    fields = {name: int(value) for name, value in _FIELD.findall(status)}
    # The words after the name, which may contain anything. The state is word 0, so minflt (field 10 in proc(5)) is 7.
    words = stat.rpartition(")")[2].split()
    found = _NOFILE.search(limits)
    most = found[1] if found else "unlimited"
    return ProcessUsage(
        pid=pid,
        anon=fields["RssAnon"] * _KIB,
        file=fields["RssFile"] * _KIB,
        shmem=fields["RssShmem"] * _KIB,
        swap=fields["VmSwap"] * _KIB,
        peak_resident=fields["VmHWM"] * _KIB,
        threads=fields["Threads"],
        minor_faults=int(words[7]),
        major_faults=int(words[9]),
        descriptors=descriptors,
        sockets=None if open_to is None else sum(link.startswith("socket:") for link in open_to),
        max_descriptors=None if most == "unlimited" else int(most),
    )


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _open_to(directory: str) -> list[str] | None:
    """None without CAP_SYS_PTRACE: the service lacks it, so it can count descriptors but not read their targets."""
    found = []
    for name in os.listdir(directory):
        try:
            found.append(os.readlink(f"{directory}/{name}"))
        except FileNotFoundError:  # closed meanwhile
            continue
        except PermissionError:
            return None
    return found
