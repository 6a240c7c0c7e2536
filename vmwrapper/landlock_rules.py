"""QEMU's Landlock rules and seccomp filter, derived from the command line that libvirt gave it. Pure.

libvirt names every file of a VM there: disks with their backing files, device nodes, the directory of huge pages, firmware, the
screen's socket. Consoles, logs and taps are open descriptors.
"""

from __future__ import annotations

import itertools
import json
import os
import stat

from vmwrapper.argv_plan import OPEN_FILES
from vmwrapper.confine import seccomp
from vmwrapper.confine.landlock import DEVICE, EXECUTE, LIST, MAKE, READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vmwrapper.confine.seccomp import Case

# For every QEMU: libraries and modules, firmware and keymaps, what libc, glib and GnuTLS read, descriptions of the machine. Only
# these files of its own process, because its mounts and its network are the node's.
_READ = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/qemu", "/usr/share/qemu-kvm", "/usr/share/seabios",
    "/usr/share/ipxe", "/usr/share/OVMF", "/usr/share/edk2", "/usr/share/locale", "/usr/share/zoneinfo",
    "/usr/share/crypto-policies", "/etc/crypto-policies", "/etc/gnutls", "/etc/ld.so.cache", "/etc/ld.so.preload",
    "/etc/localtime", "/proc/self/cmdline", "/proc/self/maps", "/proc/self/stat", "/proc/self/status",
    "/proc/cpuinfo", "/proc/filesystems", "/sys/devices/system", "/sys/kernel/mm",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/kvm")
# exec of QEMU runs the dynamic loader.
_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-musl-x86_64.so.1")

# What a QEMU with a host device on PCI or USB reads: where the device is, and its description.
_READ_FOR_PCI = ("/sys/bus/pci", "/sys/bus/mdev", "/sys/devices", "/sys/class", "/sys/kernel/iommu_groups")
# libudev checks the mount of /dev before it reports devices to libusb.
_READ_FOR_USB = ("/sys/bus/usb", "/sys/class", "/sys/devices", "/sys/dev", "/run/udev", "/proc/self")


def files(argv: Sequence[str], emulator: str, more: Sequence[str]) -> list[tuple[str, int]]:
    """QEMU's paths and their Landlock rights. `more`: paths from the node's settings, for an emulator in unusual places."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(emulator)))
    own = [f"{prefix}/{part}" for part in ("lib", "lib64", "share/qemu")] if prefix != "/" else []
    allowed = [(path, READ) for path in (*_READ, *own)]
    allowed += [(path, DEVICE) for path in _DEVICES]
    allowed += [(path, EXECUTE) for path in (emulator, *_LOADERS, *more)]
    for option, value in itertools.pairwise(argv):
        if option == "-append":  # pods choose the kernel's command line, and its paths are the guest's
            continue
        # Open files need no rule, and one for memory that has no name would be refused.
        allowed += [_named(path) for path in _paths(value) if not path.startswith(OPEN_FILES)]
        if option == "-vnc":  # QEMU makes the socket itself
            allowed += [(os.path.dirname(path), MAKE) for path in _paths(value)]
        if option == "-device":
            allowed += _for_device(value)
    return allowed


def refused_calls(argv: Sequence[str]) -> bytes:
    """The seccomp filter: no new process, no network, no connection to a socket. QEMU only listens on the sockets that it
    was given. Those of the programs that serve its devices are connected already (`calls`)."""
    sockets: list[Case] = [seccomp.UNIX_STREAMS]
    if any(option == "-device" and "usb-host" in value for option, value in itertools.pairwise(argv)):
        sockets.append(seccomp.DEVICE_NEWS)
    only: Mapping[int, Sequence[Case]] = {
        seccomp.SOCKET: sockets,
        seccomp.SOCKETPAIR: (seccomp.UNIX_STREAMS,),
        seccomp.CLONE: (seccomp.THREADS,),
    }
    return seccomp.program((*seccomp.REFUSED, seccomp.CONNECT), only, absent=(seccomp.CLONE3,))


def _paths(value: str) -> list[str]:
    """The absolute paths in an option's value: libvirt writes JSON, or key=value lists in which a comma is doubled."""
    if value.startswith("{"):
        return [text for text in _json_texts(value) if text.startswith("/")]
    fields = [field.replace("\0", ",") for field in value.replace(",,", "\0").split(",")]
    texts = [text.removeprefix("unix:") for field in fields for text in (field, field.partition("=")[2])]
    return [text for text in texts if text.startswith("/")]


def _json_texts(value: str) -> list[str]:
    try:
        return list(_texts(json.loads(value)))
    except ValueError:
        return []


def _texts(found: object) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict | list):
        for inner in found.values() if isinstance(found, dict) else found:
            yield from _texts(inner)


def _named(path: str) -> tuple[str, int]:
    """The path with the rights that its kind needs; the file's mode still decides about writing."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return path, READ
    if stat.S_ISDIR(mode):
        return path, MAKE
    return path, WRITE if stat.S_ISREG(mode) else DEVICE


def _for_device(value: str) -> Iterator[tuple[str, int]]:
    if "usb-host" in value:
        yield from ((path, READ) for path in _READ_FOR_USB)
        yield "/dev/bus/usb", LIST
    if "vfio-" not in value:
        return
    yield from ((path, READ) for path in _READ_FOR_PCI)
    yield "/dev/vfio/vfio", DEVICE
    for place in _sysfs_places(value):
        try:
            yield f"/dev/vfio/{os.path.basename(os.readlink(f'{place}/iommu_group'))}", DEVICE
        except OSError:  # QEMU reports the error
            continue


def _sysfs_places(value: str) -> list[str]:
    """A VFIO device's directories in sysfs; it is named by its PCI address, or by its path."""
    is_json = value.startswith("{")
    texts = _json_texts(value) if is_json else [field.partition("=")[2] for field in value.split(",")]
    on_pci = [f"/sys/bus/pci/devices/{text}" for text in texts if text.count(":") in (1, 2) and "/" not in text]
    return [*on_pci, *(text for text in texts if text.startswith("/sys/"))]
