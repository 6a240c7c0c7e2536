"""The embedded libvirt driver: libvirt inside this process, with its own directory and qemu.conf.

It is for `virtshim up`, demos and tests: there is no daemon, and nothing of the machine's libvirt is read or changed.
One process at a time may have a directory open. VMs outlive it, and the next process to open the directory finds them.
"""

from __future__ import annotations

import contextlib
import glob
import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

import structlog

from virtshim.model.errors import InvalidRequest
from virtshim.system.files import replace_text
from virtshim.vm.firmware import end_abandoned_swtpms
from virtshim.vm.xml_text import parsed

log = structlog.get_logger(__name__)

# The libvirt URI of this driver, followed by its directory.
URI_OF_ROOT = "qemu:///embed?root="

# Users and groups of distributions for QEMU: Debian and Ubuntu; Fedora, RHEL, SUSE, Arch.
_KNOWN_USERS = (("libvirt-qemu", "kvm"), ("qemu", "qemu"))

# libvirt makes lib/qemu/domain-<number>-<20 characters>/monitor.sock below it, which must fit into a socket address.
_LONGEST_ROOT = 45

# Directories that swtpm's user must be able to pass, whatever the umask is when libvirt makes them.
_PASSED = ("lib", "lib/swtpm", "log", "run")

_QEMU_CONF = """\
# Written by virtshim at each start: change virtshim's configuration instead.
user = "{user}"
group = "{group}"
# Disk files already have the right owners (no relabelling per disk); this is for QEMU's own directories and sockets.
dynamic_ownership = 1
remember_owner = 0
security_driver = "none"
security_default_confined = 0
seccomp_sandbox = 1
# The pod's cgroup holds QEMU and its limits.
cgroup_controllers = [ ]
# No mount namespace per VM, because it would hide device nodes that come later.
namespaces = [ ]
# No virtlogd: libvirt opens the log files and passes QEMU the descriptors; vmwrapper gives QEMU a pipe for its own log.
stdio_handler = "file"
# One byte is less than any dump. With 0 the kernel would still start a program for dumps.
max_core = 1
"""


@dataclass(frozen=True, slots=True)
class QemuUser:
    """The user and group of QEMU."""

    name: str
    group: str
    uid: int
    gid: int


def is_embedded(uri: str) -> bool:
    """Whether libvirt runs inside this process."""
    return uri.startswith("qemu:///embed")


def output_pipes(uri: str) -> str:
    """Where each QEMU finds the pipe for its output; "" for drivers that are not embedded, because virtlogd limits
    their logs."""
    return f"{os.path.abspath(uri.removeprefix(URI_OF_ROOT))}/output" if uri.startswith(URI_OF_ROOT) else ""


def qemu_user(name: str = "", group: str = "") -> QemuUser:
    """The named user and group, or the distribution's for QEMU."""
    for user_name, group_name in ((name, group),) if name else _KNOWN_USERS:
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(user_name)
            entry = grp.getgrnam(group_name) if group_name else grp.getgrgid(user.pw_gid)
            return QemuUser(user_name, entry.gr_name, user.pw_uid, entry.gr_gid)
    if name:
        raise InvalidRequest(f"user {name!r} or group {group!r}, to run QEMU as, does not exist")
    tried = ", ".join(user_name for user_name, _ in _KNOWN_USERS)
    raise InvalidRequest(f"no user to run QEMU as was found (tried {tried}): install libvirt's QEMU driver or name one")


def prepare(root: str, user: QemuUser) -> str:
    """Prepares `root` and returns the URI to open. Raises InvalidRequest if QEMU could not work below it."""
    root = os.path.abspath(root)
    if len(os.fsencode(root)) > _LONGEST_ROOT:
        raise InvalidRequest(
            f"{root} is too long for libvirt's socket paths below it ({_LONGEST_ROOT} bytes at most):"
            " choose a shorter directory"
        )
    if any(character in root for character in "?&#%;= "):
        raise InvalidRequest(
            f"{root!r} contains a character that a libvirt URI cannot carry: choose a plainer directory"
        )
    os.makedirs(root, mode=0o755, exist_ok=True)
    # QEMU's user may pass through the directory but not list it.
    os.chmod(root, 0o711)  # noqa: S103
    require_reachable(root, user)
    for directory in _PASSED:
        os.makedirs(os.path.join(root, directory), exist_ok=True)
        os.chmod(os.path.join(root, directory), 0o711)  # noqa: S103
    _leave_private_tmp()
    pipes = output_pipes(f"{URI_OF_ROOT}{root}")
    os.makedirs(pipes, exist_ok=True)
    os.chmod(pipes, 0o711)  # noqa: S103
    for name in os.listdir(pipes):  # left by interrupted starts
        os.unlink(os.path.join(pipes, name))
    configuration = os.path.join(root, "etc")
    os.makedirs(configuration, mode=0o755, exist_ok=True)
    replace_text(os.path.join(configuration, "qemu.conf"), _QEMU_CONF.format(user=user.name, group=user.group), 0o644)
    _remove_stale_status(os.path.join(root, "run", "qemu"))
    end_abandoned_swtpms(os.path.join(root, "run", "swtpm"))
    return f"{URI_OF_ROOT}{root}"


def _leave_private_tmp() -> None:
    """libvirt passes TMPDIR on to swtpm_setup, which runs as another user."""
    with contextlib.suppress(OSError):
        if "TMPDIR" in os.environ and not os.stat(os.environ["TMPDIR"]).st_mode & stat.S_IWOTH:
            del os.environ["TMPDIR"]


def _remove_stale_status(status_directory: str) -> None:
    """Removes libvirt's status files of VMs that had no QEMU yet when the last process was killed. libvirt (9.0) would
    take such a VM for running, in the middle of its start, and refuse for ever to end it. Without the file the VM is
    off."""
    for path in glob.glob(os.path.join(glob.escape(status_directory), "*.xml")):
        try:
            status = parsed(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            log.warning("libvirt.status.unreadable", path=path, error=str(exc))
            continue
        if status.tag == "domstatus" and status.get("pid") == "0":
            # This VM's start was cut off before QEMU ran: it is off.
            log.info("libvirt.status.removed", path=path)
            os.unlink(path)


def require_reachable(directory: str, user: QemuUser) -> None:
    """InvalidRequest, naming the directory in the way, if `user` cannot pass down to `directory`."""
    path = "/"
    for part in ("", *directory.strip("/").split("/")):
        path = os.path.join(path, part)
        found = os.stat(path)
        if found.st_uid == user.uid:
            bit = stat.S_IXUSR
        elif found.st_gid == user.gid:
            bit = stat.S_IXGRP
        else:
            bit = stat.S_IXOTH
        if not found.st_mode & bit:
            raise InvalidRequest(
                f"{path} is not accessible to {user.name}, the user that QEMU runs as, so VMs cannot use {directory}:"
                f" choose a directory elsewhere, or chmod o+x {path}"
            )
