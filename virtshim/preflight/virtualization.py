"""Findings about QEMU, KVM, libvirt and vmwrapper. Pure: takes facts, returns findings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from virtshim.preflight.access import AccessMode, FileStatus, UserAccount, allows, chmod_command, first_blocked
from virtshim.preflight.finding import Finding, error, ok, warning
from virtshim.vm.embed import is_embedded

_OLDEST_QEMU = (6, 2)
_VERSION = re.compile(r"version (\d+)\.(\d+)")
# passt's versions are dates: 2024_08_21.1d6142f, 0.0~git20230309.7c7625d-1.
_PASST_DATE = re.compile(r"(20\d\d)_?([01]\d)_?([0-3]\d)(?!\d)")
# The first passt without the faults that `passt` names, and an option that is new in it.
_SOUND_PASST, _SOUND_PASST_OPTION = "2024-08-21", "--map-guest-addr"


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """A program's output in `text`, or the reason for its failure in `trouble`. `late`: it did not end in time. `reached` is
    False if libvirt could not be reached."""

    text: str = ""
    trouble: str = ""
    late: bool = False
    reached: bool = True


def qemu(path: str, program_output: ProgramOutput) -> Finding:
    """`program_output`: the output of --version."""
    if program_output.trouble:
        return error(
            "QEMU", f"{path}: {program_output.trouble}", "apt-get install qemu-system-x86, or correct libvirt.emulator"
        )
    found = _VERSION.search(program_output.text)
    if found is None:
        return error(
            "QEMU", f"{path} does not report a version: {program_output.text[:80]!r}", "correct libvirt.emulator"
        )
    version = (int(found[1]), int(found[2]))
    if version < _OLDEST_QEMU:
        return error("QEMU", f"{path} is version {found[1]}.{found[2]}; 6.2 or newer is needed", "install a newer QEMU")
    return ok("QEMU", f"{path}, version {found[1]}.{found[2]}")


def qemu_img(program_output: ProgramOutput) -> Finding:
    if program_output.trouble:
        return error("qemu-img", f"{program_output.trouble}", "apt-get install qemu-utils")
    found = _VERSION.search(program_output.text)
    return ok("qemu-img", f"version {found[1]}.{found[2]}" if found else "runs")


def volumes(places: Sequence[str], there: str) -> Finding:
    """`there`: the first of the places that has a virtiofsd; "" for none."""
    if there:
        return ok("volumes", f"served by {there}")
    remedy = "apt-get install qemu-system-common (Debian 12) or virtiofsd, or set shares.virtiofsd"
    return warning("volumes", f"no virtiofsd at {', '.join(places)}: pods with volumes are refused", remedy)


def passt(place: str, version: ProgramOutput | None, options: str = "") -> Finding:
    """`version`: the output of --version; None if there is no passt. `options`: the output of --help, because Debian's passt says
    that its version is unknown."""
    subject = "containers beside VMs"
    if version is None or version.trouble:
        why = version.trouble if version else f"no passt at {place}"
        text = f"{why}: pods with containers beside their VM (RuntimeClass virtshim-pod) are refused"
        return warning(subject, text, "apt-get install passt, or set shares.passt")
    found = _PASST_DATE.search(version.text)
    date = "-".join(found.groups()) if found else ""
    if (date >= _SOUND_PASST) if date else (_SOUND_PASST_OPTION in options):
        return ok(subject, f"their VMs get the pod's network from {place}{f' of {date}' if date else ''}")
    told = f"of {date}" if date else "its version has no date"
    text = (
        f"{place} is older than {_SOUND_PASST} ({told}): servers in the guest that speak "
        "first (SMTP, MySQL, FTP) hang, and connections to the guest's IPv6 address are reset until the guest has sent a packet"
    )
    return warning(subject, text, f"install passt of {_SOUND_PASST} or later, and name it in shares.passt")


def firmware(uefi: bool, secure: bool, missing: Sequence[str]) -> Finding:
    """`uefi`, `secure`: whether firmware without and with secure boot exists. `missing`: programs of swtpm that are missing."""
    lacking = [
        *(["UEFI without secure boot"] if not uefi else []),
        *(["UEFI with secure boot"] if not secure else []),
        *missing,
    ]
    if not lacking:
        return ok("firmware", "BIOS, UEFI, secure boot, TPM")
    return warning(
        "firmware",
        f"this node has no {', no '.join(lacking)}: pods that ask for it are refused",
        "apt-get install ovmf swtpm swtpm-tools",
    )


@dataclass(frozen=True, slots=True)
class Served:
    """The users that tapmanager serves: `who`, and the VMs' users if tapmanager's socket has their `group`."""

    who: UserAccount | None
    group: frozenset[int]


def qemu_user(wanted: str, who: UserAccount | None, group_of_vms: frozenset[int], tapmanagers: Served) -> Finding:
    """`wanted`: the configured user and group, "" for the distribution's. `group_of_vms`: empty if VMs have no users of their
    own."""
    if who is None:
        named = f"the user or group {wanted} does not exist" if wanted else "this machine has no user for QEMU"
        remedy = "apt-get install libvirt-daemon-system, or set libvirt.qemu_user to the `user` of libvirt's qemu.conf"
        return error("QEMU user", named, remedy)
    if who.uid == 0:
        return warning(
            "QEMU user",
            "QEMU would run as root: a guest that breaks out of QEMU would control the node",
            "set an unprivileged libvirt.qemu_user, and the same `user` in libvirt's qemu.conf",
        )
    if tapmanagers.who is None or tapmanagers.who.uid != who.uid:
        other = "nobody" if tapmanagers.who is None else tapmanagers.who.name
        remedy = f'set tapmanager.qemu_user = "{who.name}"'
        return error("QEMU user", f"QEMU runs as {who.name}, but tapmanager serves {other}: VMs get no network", remedy)
    if not group_of_vms <= tapmanagers.group:
        return error(
            "QEMU user",
            "tapmanager's socket has another group than the VMs' users: VMs get no network",
            "set tapmanager.qemu_group to the same group as libvirt.qemu_group",
        )
    return ok("QEMU user", f"{who.name} ({who.uid})")


def kvm(domain_type: str, device: FileStatus | None, who: UserAccount) -> Finding:
    """Checks only the device file. Another finding says whether a guest boots with KVM."""
    if device is None:
        text, remedy = (
            "/dev/kvm is missing",
            "turn on virtualization in the firmware, or nested virtualization if this is a VM; modprobe kvm",
        )
        if domain_type == "kvm":
            return error("/dev/kvm", f'{text}, but libvirt.domain_type is "kvm"', remedy)
        if domain_type == "auto":
            return warning("/dev/kvm", f"{text}: VMs run in software (TCG), ten times slower", remedy)
        return ok("/dev/kvm", f'{text}; not needed with libvirt.domain_type = "qemu"')
    if allows(device, who, AccessMode.READ | AccessMode.WRITE):
        return ok("/dev/kvm", f"open to {who.name} (mode {device.permissions})")
    remedy = "chgrp kvm /dev/kvm && chmod 0660 /dev/kvm (the distribution's udev rule does this at boot)"
    text = f"/dev/kvm has mode {device.permissions} and {who.name} cannot open it"
    if domain_type == "kvm":
        return error("/dev/kvm", text, remedy)
    return warning(
        "/dev/kvm", f"{text}: libvirt probes QEMU again for each VM, which takes some seconds each time", remedy
    )


def boot(domain_type: str, works: bool, why: str) -> Finding:
    """`works`: whether a guest ran under KVM. Only called if VMs may use KVM."""
    if works:
        return ok("KVM", why)
    remedy = 'use a machine with virtualization; to do without it on purpose, set libvirt.domain_type = "qemu"'
    if domain_type == "kvm":
        return error("KVM", why, remedy)
    return warning("KVM", f"{why}; VMs run in software (TCG), ten times slower", remedy)


def vmwrapper(path: str, file: FileStatus | None, directories: Sequence[FileStatus], who: UserAccount) -> Finding:
    """`directories`: the directories on the way to the file, from / down."""
    subject = "vmwrapper"
    if file is None:
        return error(
            subject, f"{path} is missing", f"create it with virtshim's Python: python -m vmwrapper.bundle {path}"
        )
    barrier = first_blocked(directories, who)
    if barrier is not None:
        return error(
            subject,
            f"{who.name} cannot reach {path}: {barrier.path} has mode {barrier.permissions}",
            f"{chmod_command(barrier)}, or set libvirt.vmwrapper to another path",
        )
    if not allows(file, who, AccessMode.READ | AccessMode.EXECUTE):
        return error(
            subject,
            f"{path} has mode {file.permissions}: {who.name} cannot read and execute it",
            f"chmod 0755 {path}",
        )
    return ok(subject, f"{who.name} can run {path}")


def libvirt(uri: str, program_output: ProgramOutput) -> Finding:
    if not program_output.trouble:
        return ok("libvirt", f"{uri}, version {program_output.text}")
    embedded = is_embedded(uri)
    remedy = (
        "apt-get install libvirt-daemon-driver-qemu"
        if embedded
        else "apt-get install libvirt-daemon-system; systemctl enable --now libvirtd.socket; or correct libvirt.uri"
    )
    return error("libvirt", f"{uri}: {program_output.trouble}", remedy)


def read_only_sockets(found: Sequence[tuple[FileStatus, Sequence[FileStatus]]]) -> Finding:
    """`found`: the existing sockets, each with the directories on its way."""
    subject, anybody = "libvirt's read-only socket", UserAccount("any local user", -1, frozenset())
    for node, way in found:
        if allows(node, anybody, AccessMode.WRITE) and first_blocked(way, anybody) is None:
            daemon = "virtqemud" if "virtqemud" in node.path else "libvirtd"
            return warning(
                subject,
                f"{node.path} ({node.permissions}): every local user can read all VMs' definitions",
                f"systemctl mask --now {daemon}-ro.socket; "
                f'set unix_sock_ro_perms = "0700" in /etc/libvirt/{daemon}.conf; systemctl restart {daemon}',
            )
    return ok(subject, "closed to local users")


def directory(path: str, way: Sequence[FileStatus], who: UserAccount) -> Finding:
    """libvirt's directory, which holds a key for each QEMU. Debian opens it only to the common user for QEMU, and resets that
    at each upgrade of libvirt unless dpkg-statoverride prevents it. `way`: the existing directories of it from / down."""
    subject = "libvirt's directory"
    barrier = first_blocked(way, who)
    if barrier is None:
        return ok(subject, f"{who.name} can enter {path}")
    return error(
        subject,
        f"VMs cannot start: {who.name} cannot enter {barrier.path}, which has mode {barrier.permissions}",
        f"dpkg-statoverride --force-statoverride-add --update --add libvirt-qemu libvirt-qemu 0751 {barrier.path}; "
        f"on other distributions: {chmod_command(barrier)}",
    )


def runs_qemu_as(program_output: ProgramOutput, who: UserAccount) -> Finding:
    """`program_output.text`: libvirt's `+UID:+GID`; "" if libvirt does not change owners of files."""
    subject = "libvirt's user"
    if program_output.trouble:
        return warning(
            subject,
            f"libvirt does not describe this node: {program_output.trouble}",
            "read libvirt's log; if it answers slowly, the finding about /dev/kvm gives the reason",
        )
    if not program_output.text:
        return ok(subject, "libvirt does not change owners of files")
    uid = program_output.text.split(":")[0].lstrip("+")
    if uid != str(who.uid):
        return error(
            subject,
            f"libvirt runs QEMU as user {uid}, but virtshim expects {who.name} ({who.uid})",
            "set libvirt.qemu_user and `user` in libvirt's qemu.conf to the same user",
        )
    return ok(subject, f"libvirt runs QEMU as {who.name}")


def emulator(path: str, program_output: ProgramOutput) -> Finding:
    """`program_output`: whether libvirt could start vmwrapper and query the capabilities of the QEMU behind it. Its text: why
    libvirt queries each property of a guest's CPU at every start; "" if it does not."""
    if not program_output.trouble and not program_output.text:
        return ok("emulator", f"libvirt accepts {path} in place of QEMU, and the fast query of a guest's CPU")
    if not program_output.trouble:
        return warning(
            "emulator",
            f"libvirt accepts {path} in place of QEMU, but not the fast query of a guest's CPU ({program_output.text}): "
            "each VM starts about 0.4 s later",
            "use libvirt 9 or newer",
        )
    if program_output.late:
        return warning(
            "emulator",
            f"libvirt did not finish examining {path}: {program_output.trouble}",
            "run the check again, because libvirt caches the result; if it never ends, see the finding about /dev/kvm",
        )
    return error(
        "emulator",
        f"libvirt cannot use {path} in place of QEMU: {program_output.trouble}",
        f"run `{path} --version` as the QEMU user; it must print QEMU's version",
    )


@dataclass(frozen=True, slots=True)
class AppArmorProfile:
    """An AppArmor profile of this node, including its local additions; "" if it does not exist. `additions`: the file for local
    rules."""

    text: str
    additions: str


@dataclass(frozen=True, slots=True)
class AppArmor:
    """`daemon`: the profile of the libvirt daemon. `guests`: the profile of each QEMU."""

    enabled: bool
    daemon: AppArmorProfile
    guests: AppArmorProfile


def apparmor(facts: AppArmor, wrapper: str, *sockets: str) -> Finding:
    """libvirt's profiles list the programs that libvirt and QEMU may run. vmwrapper must be added to them."""
    if not facts.enabled:
        return ok("AppArmor", "not enabled")
    wanted = (
        (facts.daemon, rules_of_daemon(wrapper)),
        (facts.guests, rules_of_guests(wrapper, *sockets)),
    )
    additions = [
        f"to {profile.additions}: {' '.join(missing)}"
        for profile, rules in wanted
        if profile.text and (missing := [rule for rule in rules if rule.split()[0] not in profile.text])
    ]
    if not additions:
        return ok("AppArmor", "libvirt's profiles allow vmwrapper")
    return warning(
        "AppArmor",
        "libvirt's profiles do not allow vmwrapper: if libvirt uses them, VMs cannot start",
        f"add {'; '.join(additions)}; then run systemctl reload apparmor",
    )


def rules_of_daemon(wrapper: str) -> tuple[str, ...]:
    return (f"{wrapper} PUx,",)


def rules_of_guests(wrapper: str, *sockets: str) -> tuple[str, ...]:
    """Rules for vmwrapper before it becomes QEMU: the program, its interpreter, its call to tapmanager. Also QEMU's connection
    to the daemon of its volumes."""
    return (
        f"{wrapper} rmix,",
        "/usr/bin/python3* rmix,",
        "/usr/lib/python3*/** rm,",
        *(f"{socket} rw," for socket in sockets),
    )
