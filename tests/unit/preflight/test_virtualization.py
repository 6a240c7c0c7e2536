"""`virtshim check` reports faults of QEMU, vmwrapper, libvirt and AppArmor."""

import stat

import pytest

from virtshim.preflight import virtualization
from virtshim.preflight.access import FileStatus, UserAccount
from virtshim.preflight.finding import Level
from virtshim.preflight.virtualization import AppArmor, AppArmorProfile, ProgramOutput, rules_of_daemon, rules_of_guests

QEMU = UserAccount("libvirt-qemu", 64055, frozenset({64055, 108}))
OPEN = [FileStatus("/", stat.S_IFDIR | 0o755, 0, 0)]


@pytest.mark.parametrize(
    ("program_output", "level"),
    [
        (ProgramOutput("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright"), Level.OK),
        (ProgramOutput("QEMU emulator version 6.2.0"), Level.OK),
        (ProgramOutput("QEMU emulator version 10.0.2"), Level.OK),
        (ProgramOutput("QEMU emulator version 6.1.9"), Level.ERROR),
        (ProgramOutput("QEMU emulator version 5.2.0"), Level.ERROR),
        (ProgramOutput("hello"), Level.ERROR),
        (ProgramOutput(trouble="cannot run it"), Level.ERROR),
    ],
)
def test_qemu_must_run_and_be_6_2_or_newer(program_output: ProgramOutput, level: Level) -> None:
    assert virtualization.qemu("/usr/bin/qemu-system-x86_64", program_output).level is level


@pytest.mark.parametrize(
    ("domain_type", "mode", "level"),
    [
        ("auto", None, Level.WARNING),
        ("kvm", None, Level.ERROR),
        ("qemu", None, Level.OK),
        ("auto", 0o660, Level.OK),
        ("qemu", 0o660, Level.OK),
        ("auto", 0o600, Level.WARNING),
        ("qemu", 0o600, Level.WARNING),
        ("kvm", 0o600, Level.ERROR),
    ],
)
def test_the_kvm_device_must_be_open_to_qemu(domain_type: str, mode: int | None, level: Level) -> None:
    device = None if mode is None else FileStatus("/dev/kvm", stat.S_IFCHR | mode, 0, 108)
    assert virtualization.kvm(domain_type, device, QEMU).level is level


def test_a_closed_kvm_device_names_the_cost_and_the_remedy() -> None:
    found = virtualization.kvm("qemu", FileStatus("/dev/kvm", stat.S_IFCHR | 0o600, 0, 0), QEMU)
    assert "probes QEMU again" in found.text
    assert "chgrp kvm /dev/kvm && chmod 0660 /dev/kvm" in found.remedy


@pytest.mark.parametrize(
    ("domain_type", "works", "level"),
    [
        ("auto", True, Level.OK),
        ("kvm", True, Level.OK),
        ("auto", False, Level.WARNING),
        ("kvm", False, Level.ERROR),
    ],
)
def test_kvm_must_run_a_guest_where_it_is_wanted(domain_type: str, works: bool, level: Level) -> None:
    assert virtualization.boot(domain_type, works, "why").level is level


def test_vmwrapper_must_be_there_reachable_readable_and_executable() -> None:
    file = FileStatus("/w", stat.S_IFREG | 0o755, 0, 0)
    assert virtualization.vmwrapper("/w", file, OPEN, QEMU).level is Level.OK
    assert virtualization.vmwrapper("/w", None, OPEN, QEMU).level is Level.ERROR
    shut = [*OPEN, FileStatus("/x", stat.S_IFDIR | 0o700, 0, 0)]
    assert "chmod a+x /x" in virtualization.vmwrapper("/x/w", file, shut, QEMU).remedy
    unreadable = FileStatus("/w", stat.S_IFREG | 0o711, 0, 0)
    assert virtualization.vmwrapper("/w", unreadable, OPEN, QEMU).remedy == "chmod 0755 /w"


@pytest.mark.parametrize(
    ("who", "tapmanagers", "level"),
    [
        (QEMU, QEMU, Level.OK),
        (None, QEMU, Level.ERROR),
        (QEMU, None, Level.ERROR),
        (QEMU, UserAccount("other", 7, frozenset()), Level.ERROR),
        (UserAccount("root", 0, frozenset()), QEMU, Level.WARNING),
    ],
)
def test_qemu_needs_a_user_of_its_own_that_tapmanager_serves(
    who: UserAccount | None, tapmanagers: UserAccount | None, level: Level
) -> None:
    served = virtualization.Served(tapmanagers, frozenset({7}))
    assert virtualization.qemu_user("libvirt-qemu", who, frozenset({7}), served).level is level


def test_the_group_of_vms_must_be_that_of_tapmanagers_socket() -> None:
    served = virtualization.Served(QEMU, frozenset({7}))
    found = virtualization.qemu_user("", QEMU, frozenset({8}), served)
    assert found.level is Level.ERROR
    assert "tapmanager.qemu_group" in found.remedy
    assert virtualization.qemu_user("", QEMU, frozenset(), served).level is Level.OK, "VMs have no user of their own"


@pytest.mark.parametrize(
    ("program_output", "level"),
    [
        (ProgramOutput("+64055:+108"), Level.OK),
        (ProgramOutput(""), Level.OK),
        (ProgramOutput("+0:+0"), Level.ERROR),
        (ProgramOutput(trouble="took too long"), Level.WARNING),
    ],
)
def test_libvirt_and_the_settings_must_name_the_same_user(program_output: ProgramOutput, level: Level) -> None:
    assert virtualization.runs_qemu_as(program_output, QEMU).level is level


def test_an_unreachable_libvirt_is_reported_with_the_remedy_for_its_driver() -> None:
    system = virtualization.libvirt("qemu:///system", ProgramOutput(trouble="refused"))
    embedded = virtualization.libvirt("qemu:///embed?root=/r", ProgramOutput(trouble="no driver"))
    assert system.level is embedded.level is Level.ERROR
    assert "libvirtd.socket" in system.remedy
    assert "libvirt-daemon-driver-qemu" in embedded.remedy
    assert virtualization.libvirt("qemu:///system", ProgramOutput("9.0.0")).level is Level.OK


def test_an_emulator_that_libvirt_cannot_use_is_an_error() -> None:
    assert virtualization.emulator("/w", ProgramOutput("")).level is Level.OK
    assert virtualization.emulator("/w", ProgramOutput(trouble="Permission denied")).level is Level.ERROR
    assert virtualization.emulator("/w", ProgramOutput(trouble="took too long", late=True)).level is Level.WARNING


def apparmor(daemon: str, guests: str, *, enabled: bool = True) -> AppArmor:
    return AppArmor(enabled, AppArmorProfile(daemon, "/local/libvirtd"), AppArmorProfile(guests, "/local/libvirt-qemu"))


def test_apparmor_profiles_without_vmwrapper_warn_with_the_rules_to_add_to_each() -> None:
    facts = apparmor("/usr/bin/* PUx,", "/usr/bin/qemu-system-x86_64 rmix,")
    found = virtualization.apparmor(facts, "/usr/libexec/virtshim/vmwrapper", "/run/virtshim/tapmanager.sock")
    assert found.level is Level.WARNING
    assert "to /local/libvirtd: /usr/libexec/virtshim/vmwrapper PUx," in found.remedy
    assert "to /local/libvirt-qemu: /usr/libexec/virtshim/vmwrapper rmix," in found.remedy
    assert "/run/virtshim/tapmanager.sock rw," in found.remedy


def test_only_missing_apparmor_rules_are_requested() -> None:
    facts = apparmor("/w PUx,", "/w rmix, /usr/bin/python3* rmix, /usr/lib/python3*/** rm,")
    assert virtualization.apparmor(facts, "/w", "/s").remedy.startswith("add to /local/libvirt-qemu: /s rw,;")


def test_apparmor_is_ok_when_off_without_profiles_or_with_our_rules() -> None:
    ours = apparmor("\n".join(rules_of_daemon("/w")), "\n".join(rules_of_guests("/w", "/s")))
    for facts in (apparmor("x", "x", enabled=False), apparmor("", ""), ours):
        assert virtualization.apparmor(facts, "/w", "/s").level is Level.OK


def test_a_libvirt_that_insists_on_the_long_cpu_query_is_named() -> None:
    told = virtualization.emulator("/w", ProgramOutput("invalid qemu namespace capability 'x'"))
    assert told.level is Level.WARNING
    assert "invalid qemu namespace capability 'x'" in told.text
    assert told.remedy


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("mode", "way", "level"),
    [
        (0o666, 0o755, Level.WARNING),
        (0o777, 0o711, Level.WARNING),
        (0o660, 0o755, Level.OK),
        (0o700, 0o755, Level.OK),
        (0o666, 0o750, Level.OK),
    ],
)
def test_a_read_only_socket_that_any_local_user_reaches_is_a_warning(mode: int, way: int, level: Level) -> None:
    socket = FileStatus("/run/libvirt/libvirt-sock-ro", stat.S_IFSOCK | mode, 0, 0)
    directories = [*OPEN, FileStatus("/run/libvirt", stat.S_IFDIR | way, 0, 0)]
    assert virtualization.read_only_sockets([(socket, directories)]).level is level


def test_the_warning_says_how_to_close_the_read_only_socket() -> None:
    socket = FileStatus("/run/libvirt/virtqemud-sock-ro", stat.S_IFSOCK | 0o666, 0, 0)
    told = virtualization.read_only_sockets([(socket, OPEN)])
    assert "/run/libvirt/virtqemud-sock-ro (0666)" in told.text
    assert "mask --now virtqemud-ro.socket" in told.remedy
    assert "/etc/libvirt/virtqemud.conf" in told.remedy


@pytest.mark.parametrize(("mode", "level"), [(0o750, Level.ERROR), (0o751, Level.OK)])
def test_a_libvirt_directory_that_vms_cannot_traverse_is_an_error(mode: int, level: Level) -> None:
    way = [*OPEN, FileStatus("/var/lib/libvirt/qemu", stat.S_IFDIR | mode, 64055, 64055)]
    told = virtualization.directory(
        "/var/lib/libvirt/qemu", way, UserAccount("a VM's user", 2130706432, frozenset({104}))
    )
    assert told.level is level
    assert level is Level.OK or "0751 /var/lib/libvirt/qemu" in told.remedy


def test_a_missing_read_only_socket_counts_as_closed() -> None:
    assert virtualization.read_only_sockets([]).level is Level.OK


def test_a_node_without_virtiofsd_gets_a_warning_about_volumes() -> None:
    told = virtualization.volumes(("/usr/libexec/virtiofsd",), "")
    assert told.level is Level.WARNING
    assert "/usr/libexec/virtiofsd" in told.text
    assert "shares.virtiofsd" in told.remedy
    assert virtualization.volumes(("/a", "/b"), "/b").level is Level.OK


@pytest.mark.parametrize("told", [None, ProgramOutput(trouble="passt: killed by SIGSYS")])
def test_a_node_without_a_passt_that_runs_gets_a_warning_about_pods_with_containers(
    told: ProgramOutput | None,
) -> None:
    finding = virtualization.passt("/usr/bin/passt", told)
    assert finding.level is Level.WARNING
    assert ("no passt at /usr/bin/passt" if told is None else "SIGSYS") in finding.text
    assert "virtshim-pod" in finding.text
    assert "shares.passt" in finding.remedy


_UNKNOWN = "passt unknown version\nCopyright Red Hat"
_OPTIONS = "Usage: passt [OPTION]...\n  --map-guest-addr ADDR"


@pytest.mark.parametrize(
    ("version", "options", "is_old"),
    [
        ("passt 0.0~git20230309.7c7625d-1", "", "(of 2023-03-09)"),
        ("passt 2024_08_14.61c0b0d\nCopyright Red Hat", _OPTIONS, "(of 2024-08-14)"),
        ("passt 2024_08_21.1d6142f", "", ""),
        ("passt 0^20250611.g0293c6f-1.fc42.x86_64", "", ""),
        (_UNKNOWN, "", "older than 2024-08-21 (its version has no date)"),  # Debian 12
        (_UNKNOWN, _OPTIONS, ""),
        ("passt 1.20240.8.21", "", "older than 2024-08-21 (its version has no date)"),
        ("", "", "older than 2024-08-21 (its version has no date)"),
    ],
)
def test_an_old_passt_is_named_with_its_faults_and_the_remedy(version: str, options: str, is_old: str) -> None:
    finding = virtualization.passt("/usr/bin/passt", ProgramOutput(version), options)
    if not is_old:
        assert finding.level is Level.OK
        return
    assert finding.level is Level.WARNING
    assert is_old in finding.text
    assert "speak first" in finding.text
    assert "IPv6" in finding.text
    assert "2024-08-21 or later" in finding.remedy
    assert "shares.passt" in finding.remedy


def test_a_node_without_uefi_or_swtpm_gets_a_warning() -> None:
    assert virtualization.firmware(True, True, ()).level is Level.OK
    told = virtualization.firmware(False, True, ("swtpm",))
    assert told.level is Level.WARNING
    assert "no UEFI without secure boot, no swtpm" in told.text
    assert "ovmf" in told.remedy
