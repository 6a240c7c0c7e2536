"""Findings about the layers that confine a QEMU that its guest took over, and the parser of images. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from virtshim.images.confinement import OWN_USER, Account
from virtshim.preflight.finding import Finding, error, ok, warning
from virtshim.preflight.virtualization import ProgramOutput

_USERS, _LANDLOCK, _SECCOMP, _CORES, _SVIRT = "VMs' users", "Landlock", "seccomp", "core scheduling", "sVirt"


@dataclass(frozen=True, slots=True)
class UidRange:
    """`whose`: the owner of the range, as text for people."""

    whose: str
    first: int
    count: int

    def meets(self, other: UidRange) -> bool:
        return self.first < other.first + other.count and other.first < self.first + self.count

    def __str__(self) -> str:
        return f"{self.first} to {self.first + self.count - 1}" if self.count > 1 else str(self.first)


def taken_by(passwd: str, subuid: str) -> list[UidRange]:
    """The ranges in passwd(5) and subuid(5). Lines that cannot be parsed are skipped."""
    found = []
    for line, at, source in _fields(passwd, subuid):
        numbers = line[at : at + 2]
        if all(word.isdecimal() for word in numbers):
            count = int(numbers[1]) if source == "/etc/subuid" else 1
            found.append(UidRange(f"{line[0]} of {source}", int(numbers[0]), count))
    return found


def _fields(passwd: str, subuid: str) -> Iterable[tuple[list[str], int, str]]:
    for text, at, source, least in ((passwd, 2, "/etc/passwd", 4), (subuid, 1, "/etc/subuid", 3)):
        for line in text.splitlines():
            if len(fields := line.split(":")) >= least:
                yield fields, at, source


def users(first: int, count: int, taken: Iterable[UidRange]) -> Finding:
    if not count:
        return warning(
            _USERS,
            "all VMs run as one user: a QEMU that its guest took over can reach the other VMs",
            "set libvirt.vm_uids, or remove it from the configuration to use the default",
        )
    own = UidRange("VMs", first, count)
    for other in taken:
        if own.meets(other):
            return error(
                _USERS,
                f"the user ids {own} are for VMs, but {other.whose} has {other}: they could reach each other",
                "set libvirt.first_vm_uid to a range of unused user ids",
            )
    return ok(_USERS, f"each VM has its own, {own}")


def landlock(chosen: Collection[str], version: int) -> Finding:
    """`version`: the kernel's Landlock version, 0 for none. QEMU's rules: vmwrapper/landlock_rules.py."""
    if "landlock" not in chosen:
        return _left_out(_LANDLOCK, "landlock", "only file modes protect files")
    if not version:
        return warning(
            _LANDLOCK,
            "this kernel has no Landlock, or it is turned off: only file modes protect files",
            "use Linux 5.13 or newer, with landlock in lsm= on the kernel's command line",
        )
    held = ["files"]
    held += ["TCP"] if version >= 4 else []
    held += ["signals", "abstract sockets"] if version >= 6 else []
    return ok(_LANDLOCK, f"version {version}: confines {', '.join(held)}")


def seccomp(chosen: Collection[str], actions: str) -> Finding:
    """`actions`: the kernel's list of actions; "" if it has no filters."""
    if "seccomp" not in chosen:
        return _left_out(_SECCOMP, "seccomp", "QEMU can use the host's network, and connect to sockets of the node")
    if "errno" not in actions.split():
        return error(
            _SECCOMP, "this kernel has no seccomp filters: no VM would start", "use a kernel with CONFIG_SECCOMP_FILTER"
        )
    return ok(_SECCOMP, "QEMU cannot use networks, processes or sockets of others")


def core_scheduling(chosen: Collection[str], *, has_it: bool, has_siblings: bool) -> Finding:
    if not has_siblings:
        return ok(_CORES, "not needed: no core runs two threads at the same time")
    if "core-scheduling" not in chosen:
        return _left_out(_CORES, "core-scheduling", "two VMs can run on one core at the same time")
    if not has_it:
        return warning(
            _CORES,
            "this kernel has none: two VMs can run on one core at the same time, which allows side channels",
            "use a kernel with CONFIG_SCHED_CORE (5.14 or newer), or turn SMT off (nosmt)",
        )
    return ok(_CORES, "no two VMs run on one core at the same time")


def svirt(modules: Collection[str], labelled_by: Collection[str] | None, *, embedded: bool) -> Finding:
    """`modules`: which of AppArmor and SELinux are on. `labelled_by`: which of them libvirt reports to use; None if libvirt did
    not answer."""
    if embedded:
        return ok(_SVIRT, "the embedded driver has none; users, Landlock and seccomp confine VMs")
    if not modules:
        return warning(
            _SVIRT,
            "neither AppArmor nor SELinux is on: libvirt labels no VM",
            "turn on the one that the distribution supports; users, Landlock and seccomp confine VMs without it too",
        )
    used = {name.lower() for name in labelled_by} if labelled_by is not None else set()
    if labelled_by is not None and not any(name.lower() in used for name in modules):
        return warning(
            _SVIRT,
            f"{' and '.join(sorted(modules))} is on, but libvirt labels no VM for it",
            'remove security_driver = "none" from libvirt\'s qemu.conf, or install libvirt with that driver; restart libvirt',
        )
    return ok(_SVIRT, f"libvirt labels VMs ({' and '.join(sorted(modules))})")


def _left_out(subject: str, word: str, so: str) -> Finding:
    return warning(subject, f"turned off by libvirt.confine: {so}", f'add "{word}" to libvirt.confine')


# The process that parses images: does it run without rights?

_SUBJECT = "image parsers"


def no_parser_user(trouble: str) -> Finding:
    return error(_SUBJECT, trouble, "run systemd-sysusers, or correct images.parser_user")


def parser_confinement(who: Account, wanted: str, said: ProgramOutput) -> Finding:
    """`wanted`: the configured user, "" for the default. `said`: the child's report, see `virtshim.images.confined.program`."""
    facts = dict(line.partition(" ")[::2] for line in said.text.splitlines())
    if said.trouble or "landlock" not in facts:
        return error(
            _SUBJECT,
            f"the process that parses images keeps its rights: {said.trouble or 'it does not say which'}",
            "run virtshim as root with CAP_SETUID and CAP_SETGID, on a kernel with seccomp filters",
        )
    if facts["landlock"] == "0":
        return warning(
            _SUBJECT,
            f"this kernel has no Landlock: an image that takes over its parser can read the files that {who.name} may read",
            "use Linux 5.13 or newer, with landlock in lsm= on the kernel's command line",
        )
    if not wanted and who.name != OWN_USER:
        return warning(
            _SUBJECT,
            f"images are parsed as {who.name}, and other programs may run as this user too",
            "run systemd-sysusers with virtshim's sysusers.d file, or set images.parser_user",
        )
    namespaces = facts.get("namespaces", "")
    own = f", own namespaces: {namespaces}" if namespaces else ""
    return ok(_SUBJECT, f"runs as {who.name}, with seccomp, Landlock {facts['landlock']}{own}")
