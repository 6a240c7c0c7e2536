"""Collects data of the machine: versions, processes, cgroups, mounts, disks, devices, network."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from tapmanager.cgroups.tree import hierarchies
from tapmanager.shares.passt import PROGRAM as PASST
from tapmanager.shares.plan import PROGRAMS
from virtshim.cli.diag.gather import File, Node
from virtshim.cli.diag.programs import all_said, file_text, listing, said
from virtshim.cli.diag.records import ledger_namespaces
from virtshim.cli.diag.secrets import REMOVED
from virtshim.cli.diag.vms import our_domains

# Processes. The archive shows the command lines of virtshim's own processes; of all others only the names.

HEAD: Final = f"{'PID':>8} {'PARENT':>8} {'USER':>10} S {'THR':>5} {'KiB':>10} {'CPU s':>10} COMMAND"

_PROGRAMS: Final = ("virtshim", "tapmanager", "vmwrapper")
# Other software runs these programs too. The command lines of virtshim's name one of its VMs or paths.
_LENT: Final = ("qemu", "virtiofsd", "swtpm")

# Commands of `virtshim` that are followed by a guest's command.
_FOR_GUESTS: Final = frozenset(("exec", "ssh", "run"))


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    name: str
    is_ours: bool
    line: str


def all_processes(node: Node) -> list[Process]:
    """Does not read environments."""
    ours = (*(one.uuid for one in our_domains(node) if one.uuid), *(f"{place}/" for place in _directories(node)))
    found = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has just ended
            found.append(_process(pid, ours))
    return found


def _directories(node: Node) -> Sequence[str]:
    paths, run_dir = node.settings.paths, os.path.dirname(node.settings.shares.socket)
    return tuple(place for place in (paths.state_dir, paths.run_dir, run_dir) if place.strip("/"))


def _process(pid: int, ours: Sequence[str]) -> Process:
    head, _, tail = file_text(f"/proc/{pid}/stat").rpartition(")")
    name, fields = head.partition("(")[2], tail.split()
    if not _is_ours(words := file_text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0"), ours):
        return Process(pid, name, False, f"{pid:>8} {'':>8} {'':>10} {fields[0]} {'':>5} {'':>10} {'':>10} [{name}]")
    owner = os.stat(f"/proc/{pid}").st_uid
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") >> 10
    line = f"{pid:>8} {fields[1]:>8} {owner:>10} {fields[0]} {fields[17]:>5} {memory:>10} {seconds:>10.1f}"
    return Process(pid, name, True, f"{line} {' '.join(_of_ours(words))}")


def _of_ours(words: Sequence[str]) -> Sequence[str]:
    """The command line without the command and variables for a guest."""
    at = next((at for at, word in enumerate(words) if word in _FOR_GUESTS), len(words))
    return words if _is_lent(words) or at == len(words) else (*words[: at + 1], REMOVED)


def _is_ours(words: Sequence[str], ours: Sequence[str]) -> bool:
    program = os.path.basename(words[0])
    if _is_lent(words):
        return any(one in word for word in words[1:] for one in ours)
    return _is_program(_script(words) if program.startswith("python") else program)


def _is_lent(words: Sequence[str]) -> bool:
    return any(part in os.path.basename(words[0]) for part in _LENT)


def _script(words: Sequence[str]) -> str:
    """The module or file that Python runs; "" for code on the command line."""
    for before, word in itertools.pairwise(words):
        if not word.startswith("-"):
            return "" if before == "-c" else word
    return ""


def _is_program(word: str) -> bool:
    """Matches `virtshim`, `/usr/bin/virtshim-shares`, and Python's arguments: `tapmanager.shares`, a file of this package."""
    name = os.path.basename(word)
    return any(
        name == program or name.startswith((f"{program}-", f"{program}.")) or f"/{program}/" in word
        for program in _PROGRAMS
    )


_MOST_GROUPS: Final = 500


def versions(node: Node) -> Iterator[File]:
    """Versions of the kernel, of the programs that virtshim uses, and of Python packages."""
    own = f"virtshim {metadata.version('virtshim')}\nPython {platform.python_version()}\n"
    yield "system.txt", own + said("uname", "-a") + said("cat", "/etc/os-release") + said("uptime")
    virtiofsd = node.settings.shares.virtiofsd or next((path for path in PROGRAMS if os.path.exists(path)), "virtiofsd")
    programs = (
        node.settings.libvirt.emulator,
        "qemu-img",
        virtiofsd,
        node.settings.shares.passt or PASST,
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
        "passt*",
        "containerd*",
        "containernetworking*",
        "kube*",
        "linux-image*",
    )
    yield "debian.txt", said("dpkg-query", "--show", *patterns)


def processes(node: Node) -> Iterator[File]:
    """All processes, but the command lines only of virtshim's own: those of others are private."""
    yield "all.txt", "\n".join([HEAD, *(one.line for one in all_processes(node))]) + "\n"
    yield "memory.txt", file_text("/proc/meminfo") + file_text("/proc/loadavg")
    for name in ("cpu", "memory", "io"):
        with contextlib.suppress(OSError):
            yield f"pressure-{name}.txt", file_text(f"/proc/pressure/{name}")


def cgroups(node: Node) -> Iterator[File]:
    """Every value of the cgroups that hold virtshim's processes and VMs."""
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
    """Mounts of this namespace, and of virtshim's processes that have their own mount namespace."""
    yield "all.txt", file_text("/proc/self/mountinfo")
    own = os.stat("/proc/self/ns/mnt").st_ino
    for one in all_processes(node):
        if one.is_ours and "qemu" not in one.name:
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{one.pid}/ns/mnt").st_ino != own:
                    yield f"{one.name}-{one.pid}.txt", file_text(f"/proc/{one.pid}/mountinfo")


def disks(node: Node) -> Iterator[File]:
    """Free space on the disks, and what uses the space."""
    yield "room.txt", all_said(("df", "--local", "--print-type"), ("df", "--local", "--inodes"))
    paths = node.settings.paths
    yield "state.txt", listing(paths.state_dir)
    yield "run.txt", listing(paths.run_dir)


def devices(_node: Node) -> Iterator[File]:
    yield "pci.txt", said("lspci", "-nnk")
    yield "nodes.txt", "".join(listing(path, 200) for path in ("/dev/vfio", "/sys/kernel/iommu_groups"))
    yield "kvm.txt", said("ls", "-l", "/dev/kvm", "/dev/vhost-net", "/dev/net/tun")


# Network: links, addresses, routes, neighbours and packet filters, of the node and of each pod's namespace.

_MOST_NAMESPACES: Final = 100

_LINKS: Final = (("ip", "-s", "-d", "address", "show"), ("bridge", "-d", "link", "show"), ("bridge", "fdb", "show"))
_ROUTES: Final = (
    ("ip", "-4", "route", "show", "table", "all"),
    ("ip", "-6", "route", "show", "table", "all"),
    ("ip", "-4", "rule", "show"),
    ("ip", "-6", "rule", "show"),
    ("ip", "neighbour", "show"),
)
_FILTERS: Final = (("nft", "list", "ruleset"),)


def network(_node: Node) -> Iterator[File]:
    """The network of the node itself."""
    yield "links.txt", all_said(*_LINKS, ("bridge", "vlan", "show"))
    yield "routes.txt", all_said(*_ROUTES)
    yield "nft.txt", all_said(*_FILTERS)
    yield "iptables.txt", all_said(("iptables-save", "-c"), ("ip6tables-save", "-c"))
    yield "sockets.txt", all_said(("ss", "-lntup"), ("ss", "-lxp"))
    yield "forwarding.txt", all_said(("sysctl", "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.bridge"))


def network_namespaces(node: Node) -> Iterator[File]:
    """The network of each pod."""
    directory = node.settings.tapmanager.netns_dir
    yield "all.txt", listing(directory)
    ours = ledger_namespaces(node)
    for path in ours[:_MOST_NAMESPACES]:
        inside = [_in(path, command) for command in (*_LINKS, *_ROUTES, *_FILTERS)]
        yield f"{os.path.basename(path)}.txt", all_said(*inside, seconds=5)
    if len(ours) > _MOST_NAMESPACES:
        yield "left-out.txt", "".join(f"{path}\n" for path in ours[_MOST_NAMESPACES:])


def _in(path: str, command: Sequence[str]) -> Sequence[str]:
    return ("nsenter", f"--net={path}", "--", *command)
