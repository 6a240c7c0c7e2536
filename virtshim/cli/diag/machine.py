"""The machine: versions, processes, cgroups, mounts, disks, devices."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from tapmanager.cgroups.tree import hierarchies
from tapmanager.shares.plan import PROGRAMS
from virtshim.cli.diag.gather import File, Node
from virtshim.cli.diag.processes import HEAD, all_processes
from virtshim.cli.diag.programs import all_said, file_text, listing, said

_MOST_GROUPS: Final = 500


def versions(node: Node) -> Iterator[File]:
    """Of the kernel, of the programs that are used, and of Python's packages."""
    own = f"virtshim {metadata.version('virtshim')}\nPython {platform.python_version()}\n"
    yield "system.txt", own + said("uname", "-a") + said("cat", "/etc/os-release") + said("uptime")
    virtiofsd = node.settings.shares.virtiofsd or next((path for path in PROGRAMS if os.path.exists(path)), "virtiofsd")
    programs = (
        node.settings.libvirt.emulator,
        "qemu-img",
        virtiofsd,
        "libvirtd",
        "virsh",
        "containerd",
        "crictl",
        "kubelet",
    )
    yield "programs.txt", all_said(*((program, "--version") for program in programs))
    packages = sorted({f"{one.metadata['Name']} {one.version}" for one in metadata.distributions()}, key=str.lower)
    yield "python.txt", "\n".join(packages) + "\n"
    patterns = (
        "virtshim*",
        "libvirt*",
        "qemu*",
        "virtiofsd*",
        "containerd*",
        "containernetworking*",
        "kube*",
        "linux-image*",
    )
    yield "debian.txt", said("dpkg-query", "--show", *patterns)


def processes(node: Node) -> Iterator[File]:
    """All that run: what was said to others when they were started is nobody's business."""
    yield "all.txt", "\n".join([HEAD, *(one.line for one in all_processes(node))]) + "\n"
    yield "memory.txt", file_text("/proc/meminfo") + file_text("/proc/loadavg")
    for name in ("cpu", "memory", "io"):
        with contextlib.suppress(OSError):
            yield f"pressure-{name}.txt", file_text(f"/proc/pressure/{name}")


def cgroups(node: Node) -> Iterator[File]:
    """Those that our programs and VMs are in: every value of each."""
    mounted = hierarchies()
    yield (
        "hierarchies.txt",
        "".join(f"{one.root} {'v2' if one.is_v2 else ','.join(sorted(one.controllers))}\n" for one in mounted),
    )
    paths: dict[str, list[str]] = {}
    for one in all_processes(node):
        if one.is_ours:
            with contextlib.suppress(OSError):
                for line in file_text(f"/proc/{one.pid}/cgroup").splitlines():
                    paths.setdefault(line.partition(":")[2].partition(":")[2], []).append(f"{one.pid} {one.name}")
    for number, (path, members) in enumerate(sorted(paths.items())):
        if number == _MOST_GROUPS:
            yield "left-out.txt", f"{len(paths) - _MOST_GROUPS} more\n"
            return
        values = [line for one in mounted for line in _values(one.root + path)]
        yield f"{number:03}.txt", "\n".join([path, *members, "", *values]) + "\n"


def _values(directory: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            path = f"{directory}/{name}"
            if (
                os.path.isfile(path)
                and os.stat(path).st_mode & 0o400
                and not name.endswith((".procs", ".threads", "tasks"))
            ):
                with contextlib.suppress(OSError):
                    yield f"{path}: {' | '.join(file_text(path, 4096).splitlines())}"


def mounts(node: Node) -> Iterator[File]:
    """Of this namespace, and of programs that have one of their own."""
    yield "all.txt", file_text("/proc/self/mountinfo")
    own = os.stat("/proc/self/ns/mnt").st_ino
    for one in all_processes(node):
        if one.is_ours and "qemu" not in one.name:
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{one.pid}/ns/mnt").st_ino != own:
                    yield f"{one.name}-{one.pid}.txt", file_text(f"/proc/{one.pid}/mountinfo")


def disks(node: Node) -> Iterator[File]:
    """Room, and what takes it."""
    yield "room.txt", all_said(("df", "--local", "--print-type"), ("df", "--local", "--inodes"))
    paths = node.settings.paths
    yield "state.txt", listing(paths.state_dir)
    yield "run.txt", listing(paths.run_dir)


def devices(_node: Node) -> Iterator[File]:
    yield "pci.txt", said("lspci", "-nnk")
    yield "nodes.txt", "".join(listing(path, 200) for path in ("/dev/vfio", "/sys/kernel/iommu_groups"))
    yield "kvm.txt", said("ls", "-l", "/dev/kvm", "/dev/vhost-net", "/dev/net/tun")
