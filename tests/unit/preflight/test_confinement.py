"""`virtshim check` reports which layers confine a taken-over QEMU."""

import pytest

from virtshim.config.settings import Libvirt
from virtshim.preflight import confinement
from virtshim.preflight.confinement import UidRange
from virtshim.preflight.finding import Level
from virtshim.vm.elements.text import security_models_in

ALL = Libvirt().confine
FIRST, COUNT = Libvirt().first_vm_uid, Libvirt().vm_uids


def test_the_finding_says_that_each_vm_has_its_own_user() -> None:
    assert confinement.users(FIRST, COUNT, []).level is Level.OK
    assert confinement.users(FIRST, 0, []).level is Level.WARNING


@pytest.mark.parametrize(
    ("passwd", "subuid", "level"),
    [
        ("root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:\n", "me:100000:65536\n", Level.OK),
        (f"odd:x:{FIRST}:1::/:\n", "", Level.ERROR),
        (f"odd:x:{FIRST + COUNT - 1}:1::/:\n", "", Level.ERROR),
        (f"odd:x:{FIRST + COUNT}:1::/:\n", "", Level.OK),
        ("", f"me:{FIRST - 10}:11\n", Level.ERROR),
        ("", f"me:{FIRST - 10}:10\n", Level.OK),
        ("nonsense\n+::::::\n", "more:nonsense\nx:y:z\n", Level.OK),
    ],
)
def test_no_other_user_may_have_a_uid_of_the_range(passwd: str, subuid: str, level: Level) -> None:
    assert confinement.users(FIRST, COUNT, confinement.taken_by(passwd, subuid)).level is level


def test_a_user_with_a_uid_of_the_range_is_named() -> None:
    found = confinement.users(1000, 10, [UidRange("me of /etc/subuid", 1005, 100)])
    assert "me of /etc/subuid has 1005 to 1104" in found.text


@pytest.mark.parametrize(("version", "level"), [(0, Level.WARNING), (1, Level.OK), (6, Level.OK)])
def test_landlock_may_be_missing(version: int, level: Level) -> None:
    found = confinement.landlock(ALL, version)
    assert found.level is level
    assert ("signals" in found.text) == (version >= 6)


def test_without_seccomp_no_vm_would_start() -> None:
    assert confinement.seccomp(ALL, "kill_process kill_thread trap errno trace log allow").level is Level.OK
    assert confinement.seccomp(ALL, "").level is Level.ERROR


@pytest.mark.parametrize(
    ("has_it", "has_siblings", "level"),
    [(True, True, Level.OK), (False, True, Level.WARNING), (False, False, Level.OK)],
)
def test_core_scheduling_matters_where_cores_have_siblings(has_it: bool, has_siblings: bool, level: Level) -> None:
    assert confinement.core_scheduling(ALL, has_it=has_it, has_siblings=has_siblings).level is level


def test_layers_that_the_settings_switch_off_are_named() -> None:
    for found in (
        confinement.landlock((), 7),
        confinement.seccomp((), "errno"),
        confinement.core_scheduling((), has_it=True, has_siblings=True),
    ):
        assert found.level is Level.WARNING
        assert "libvirt.confine" in found.remedy


def test_missing_security_labels_are_reported_unless_libvirt_is_embedded() -> None:
    assert confinement.svirt([], [], embedded=False).level is Level.WARNING
    assert confinement.svirt([], None, embedded=True).level is Level.OK


@pytest.mark.parametrize(
    ("modules", "labelled_by", "level"),
    [
        (["AppArmor"], ["apparmor"], Level.OK),
        (["SELinux"], ["selinux"], Level.OK),
        (["AppArmor"], None, Level.OK),
        (["AppArmor"], [], Level.WARNING),
        (["SELinux"], ["apparmor"], Level.WARNING),
    ],
)
def test_a_libvirt_that_does_not_use_security_labels_is_reported(
    modules: list[str], labelled_by: list[str] | None, level: Level
) -> None:
    assert confinement.svirt(modules, labelled_by, embedded=False).level is level


CAPABILITIES = """<capabilities><host><uuid>x</uuid>{}<secmodel><model>dac</model><doi>0</doi>
<baselabel type='kvm'>+64055:+64055</baselabel></secmodel></host><guest><secmodel><model>apparmor</model></secmodel></guest>
</capabilities>"""


@pytest.mark.parametrize(
    ("models", "labelled_by"), [([], []), (["apparmor"], ["apparmor"]), (["selinux"], ["selinux"]), (["none"], [])]
)
def test_the_security_driver_is_read_from_libvirts_capabilities(models: list[str], labelled_by: list[str]) -> None:
    text = "".join(f"<secmodel><model>{model}</model><doi>0</doi></secmodel>" for model in models)
    assert security_models_in(CAPABILITIES.format(text)) == labelled_by
