"""Findings about QEMU, KVM, libvirt and vmwrapper. Pure: facts in, findings out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from virtshim.preflight.access import AccessMode, FileStatus, UserAccount, allows, chmod_command, first_blocked
from virtshim.preflight.finding import Finding, error, ok, warning
from virtshim.vm.embed import is_embedded

_OLDEST_QEMU = (6, 2)
_VERSION = re.compile(r"version (\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """A program's words: `text` if it worked, else `trouble`; `late` if it did not end in time. `reached` is False for a
    question to libvirt that did not get so far."""

    text: str = ""
    trouble: str = ""
    late: bool = False
    reached: bool = True


def qemu(path: str, program_output: ProgramOutput) -> Finding:
    """`program_output`: the answer to --version."""
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
        return error("QEMU", f"{path} is version {found[1]}.{found[2]}; 6.2 is needed", "install a newer QEMU")
    return ok("QEMU", f"{path}, version {found[1]}.{found[2]}")


def qemu_img(program_output: ProgramOutput) -> Finding:
    if program_output.trouble:
        return error("qemu-img", f"{program_output.trouble}", "apt-get install qemu-utils")
    found = _VERSION.search(program_output.text)
    return ok("qemu-img", f"version {found[1]}.{found[2]}" if found else "runs")


def volumes(places: Sequence[str], there: str) -> Finding:
    """`there`: the first of those places that has a virtiofsd, "" for none."""
    if there:
        return ok("volumes", f"served by {there}")
    remedy = "apt-get install qemu-system-common (Debian 12) or virtiofsd, or set shares.virtiofsd"
    return warning("volumes", f"no virtiofsd at {', '.join(places)}: pods with volumes are refused", remedy)


def firmware(uefi: bool, secure: bool, missing: Sequence[str]) -> Finding:
    """Whether there is a UEFI, and one with secure boot; which of swtpm's programs are not there."""
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
    """Whom tapmanager serves: `who`, and VMs' users if its socket is of the `group` that they have."""

    who: UserAccount | None
    group: frozenset[int]


def qemu_user(wanted: str, who: UserAccount | None, group_of_vms: frozenset[int], tapmanagers: Served) -> Finding:
    """`wanted`: user and group as set, "" for the distribution's own; `group_of_vms`: empty where none has a user of its own."""
    if who is None:
        named = f"there is no user or group {wanted}" if wanted else "this machine has no user for QEMU"
        remedy = "apt-get install libvirt-daemon-system, or set libvirt.qemu_user to the `user` of libvirt's qemu.conf"
        return error("QEMU user", named, remedy)
    if who.uid == 0:
        return warning(
            "QEMU user",
            "QEMU is to run as root: a guest that breaks out of QEMU owns the node",
            "set an unprivileged libvirt.qemu_user, and the same `user` in libvirt's qemu.conf",
        )
    if tapmanagers.who is None or tapmanagers.who.uid != who.uid:
        other = "nobody" if tapmanagers.who is None else tapmanagers.who.name
        remedy = f'set tapmanager.qemu_user = "{who.name}"'
        return error("QEMU user", f"QEMU runs as {who.name}, but tapmanager serves {other}: VMs get no network", remedy)
    if not group_of_vms <= tapmanagers.group:
        return error(
            "QEMU user",
            "VMs' users are not in the group of tapmanager's socket: VMs get no network",
            "set tapmanager.qemu_group to the same group as libvirt.qemu_group",
        )
    return ok("QEMU user", f"{who.name} ({who.uid})")


def kvm(domain_type: str, device: FileStatus | None, who: UserAccount) -> Finding:
    """The device file only; whether a guest boots with it is another finding."""
    if device is None:
        text, remedy = "/dev/kvm is missing", "turn virtualization on in the firmware, or nested for a VM; modprobe kvm"
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
    return warning("/dev/kvm", f"{text}: libvirt probes QEMU anew for each VM, some seconds each time", remedy)


def boot(domain_type: str, works: bool, why: str) -> Finding:
    """`works`: whether a guest ran under KVM; asked where VMs may run under it."""
    if works:
        return ok("KVM", why)
    remedy = 'use a machine with virtualization; on purpose without it: libvirt.domain_type = "qemu"'
    if domain_type == "kvm":
        return error("KVM", why, remedy)
    return warning("KVM", f"{why}; VMs run in software (TCG), ten times slower", remedy)


def vmwrapper(path: str, file: FileStatus | None, directories: Sequence[FileStatus], who: UserAccount) -> Finding:
    """`directories`: those on the way to the file, from / down."""
    subject = "vmwrapper"
    if file is None:
        return error(
            subject, f"{path} is missing", f"write it with virtshim's Python: python -m vmwrapper.bundle {path}"
        )
    barrier = first_blocked(directories, who)
    if barrier is not None:
        return error(
            subject,
            f"{path} cannot be reached by {who.name}: {barrier.path} has mode {barrier.permissions}",
            f"{chmod_command(barrier)}, or put vmwrapper elsewhere (libvirt.vmwrapper)",
        )
    if not allows(file, who, AccessMode.READ | AccessMode.EXECUTE):
        return error(
            subject,
            f"{path} has mode {file.permissions}: {who.name} cannot read and execute it",
            f"chmod 0755 {path}",
        )
    return ok(subject, f"{path} can be run by {who.name}")


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
    """`found`: those that are there, each with the directories on its way."""
    subject, anybody = "libvirt's read-only socket", UserAccount("any local user", -1, frozenset())
    for node, way in found:
        if allows(node, anybody, AccessMode.WRITE) and first_blocked(way, anybody) is None:
            daemon = "virtqemud" if "virtqemud" in node.path else "libvirtd"
            return warning(
                subject,
                f"{node.path} ({node.permissions}): every local user sees all VMs' definitions",
                f"systemctl mask --now {daemon}-ro.socket; "
                f'set unix_sock_ro_perms = "0700" in /etc/libvirt/{daemon}.conf; systemctl restart {daemon}',
            )
    return ok(subject, "closed to local users")


def directory(path: str, way: Sequence[FileStatus], who: UserAccount) -> Finding:
    """libvirt's own, with a key for each QEMU. Debian closes it to all but the common user for QEMU, and again at each upgrade of
    libvirt, unless it is told to leave it. `way`: what exists of it from / down."""
    subject = "libvirt's directory"
    barrier = first_blocked(way, who)
    if barrier is None:
        return ok(subject, f"{path} can be passed by {who.name}")
    return error(
        subject,
        f"no VM starts: {who.name} cannot pass {barrier.path}, which has mode {barrier.permissions}",
        f"dpkg-statoverride --force-statoverride-add --update --add libvirt-qemu libvirt-qemu 0751 {barrier.path}; "
        f"elsewhere: {chmod_command(barrier)}",
    )


def runs_qemu_as(program_output: ProgramOutput, who: UserAccount) -> Finding:
    """`program_output.text`: libvirt's `+UID:+GID`, "" if it changes no owners."""
    subject = "libvirt's user"
    if program_output.trouble:
        return warning(
            subject,
            f"libvirt does not describe this node: {program_output.trouble}",
            "look into its log; when it takes long, the finding about /dev/kvm says why",
        )
    if not program_output.text:
        return ok(subject, "libvirt does not change owners of files")
    uid = program_output.text.split(":")[0].lstrip("+")
    if uid != str(who.uid):
        return error(
            subject,
            f"libvirt runs QEMU as user {uid}, virtshim expects {who.name} ({who.uid})",
            "make them the same: libvirt.qemu_user here, or `user` in libvirt's qemu.conf",
        )
    return ok(subject, f"libvirt runs QEMU as {who.name}")


def emulator(path: str, program_output: ProgramOutput) -> Finding:
    """`program_output`: whether libvirt could start vmwrapper and ask the QEMU behind it what it can do; its text, why libvirt
    insists on asking for each property of a guest's CPU at every start, "" if it does not."""
    if not program_output.trouble and not program_output.text:
        return ok("emulator", f"libvirt accepts {path} in QEMU's place, and its short question about a guest's CPU")
    if not program_output.trouble:
        return warning(
            "emulator",
            f"libvirt accepts {path} in QEMU's place, but not the short question about a guest's CPU ({program_output.text}): "
            "each VM starts some 0.4 s later",
            "use libvirt 9 or newer",
        )
    if program_output.late:
        return warning(
            "emulator",
            f"libvirt takes long to examine {path}: {program_output.trouble}",
            "run the check again: libvirt caches the result; if it never ends, the finding about /dev/kvm says why",
        )
    return error(
        "emulator",
        f"libvirt cannot use {path} in QEMU's place: {program_output.trouble}",
        f"run `{path} --version` as the QEMU user; it must print QEMU's version",
    )


@dataclass(frozen=True, slots=True)
class AppArmorProfile:
    """An AppArmor profile as it stands on this node, its local additions included; "" if it is not there. `additions` is
    the file for the node's own rules."""

    text: str
    additions: str


@dataclass(frozen=True, slots=True)
class AppArmor:
    """`daemon` confines libvirt itself, `guests` each QEMU."""

    enabled: bool
    daemon: AppArmorProfile
    guests: AppArmorProfile


def apparmor(facts: AppArmor, wrapper: str, *sockets: str) -> Finding:
    """libvirt's profiles list every program it may run and QEMU may be; vmwrapper is not among them by itself."""
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
        return ok("AppArmor", "nothing in libvirt's profiles keeps vmwrapper out")
    return warning(
        "AppArmor",
        "libvirt's profiles do not name vmwrapper: where libvirt uses them, no VM starts",
        f"add {'; '.join(additions)}; then systemctl reload apparmor",
    )


def rules_of_daemon(wrapper: str) -> tuple[str, ...]:
    return (f"{wrapper} PUx,",)


def rules_of_guests(wrapper: str, *sockets: str) -> tuple[str, ...]:
    """What vmwrapper does before it becomes QEMU: itself, its interpreter, its call to tapmanager; and QEMU's call to who serves
    its volumes."""
    return (
        f"{wrapper} rmix,",
        "/usr/bin/python3* rmix,",
        "/usr/lib/python3*/** rm,",
        *(f"{socket} rw," for socket in sockets),
    )
