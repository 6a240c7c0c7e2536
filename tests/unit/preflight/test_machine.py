"""`virtshim check` reports disk space, socket paths, forwarding and other facts of the machine."""

import stat
from pathlib import Path

import pytest

from virtshim.config.settings import Settings
from virtshim.preflight import checks, machine
from virtshim.preflight.access import FileStatus, UserAccount
from virtshim.preflight.finding import Level
from virtshim.preflight.machine import Cgroups, FreeSpace

GIB = 1 << 30
QEMU = UserAccount("libvirt-qemu", 64055, frozenset({64055, 108}))


@pytest.mark.parametrize(
    ("free", "inodes", "level"),
    [
        (100 * GIB, 1_000_000, Level.OK),
        (100 * GIB, None, Level.OK),
        (10 * GIB - 1, 1_000_000, Level.WARNING),
        (GIB - 1, 1_000_000, Level.ERROR),
        (100 * GIB, 9_999, Level.WARNING),
        (100 * GIB, 499, Level.ERROR),
    ],
)
def test_little_free_space_warns_and_no_space_is_an_error(free: int, inodes: int | None, level: Level) -> None:
    assert machine.room(FreeSpace("/var/lib/virtshim", free, inodes)).level is level


def test_a_directory_closed_to_qemu_is_an_error_that_names_it_and_both_ways_out() -> None:
    way = [FileStatus("/", stat.S_IFDIR | 0o755, 0, 0), FileStatus("/secret", stat.S_IFDIR | 0o700, 0, 0)]
    found = machine.reach("paths.state_dir", "/secret/virtshim", way, QEMU)
    assert found.level is Level.ERROR
    assert "/secret has mode 0700" in found.text
    assert found.remedy == "set paths.state_dir to another path, or run chmod a+x /secret"


def test_a_path_that_qemu_can_traverse_is_ok() -> None:
    way = [FileStatus("/", stat.S_IFDIR | 0o755, 0, 0), FileStatus("/s", stat.S_IFDIR | 0o711, 0, 0)]
    assert machine.reach("paths.state_dir", "/s", way, QEMU).level is Level.OK


def test_sockets_may_have_107_bytes() -> None:
    assert machine.sockets(("/short", "/" + "a" * 106)).level is Level.OK
    assert machine.sockets(("/short", "/" + "a" * 107)).level is Level.ERROR


@pytest.mark.parametrize(
    ("found", "driver", "systemd", "level"),
    [
        (Cgroups.V2, "systemd", True, Level.OK),
        (Cgroups.V2, "cgroupfs", False, Level.OK),
        (Cgroups.V2, "systemd", False, Level.ERROR),
        (Cgroups.HYBRID, "cgroupfs", False, Level.WARNING),
        (Cgroups.V1, "systemd", True, Level.WARNING),
        (Cgroups.NONE, "cgroupfs", False, Level.ERROR),
    ],
)
def test_a_node_needs_cgroups_that_fit_the_driver(found: Cgroups, driver: str, systemd: bool, level: Level) -> None:
    assert machine.cgroups(found, driver, systemd).level is level


@pytest.mark.parametrize(
    ("qemu_conf", "level"),
    [
        ("", Level.ERROR),
        ("#cgroup_controllers = [ ]\n", Level.ERROR),
        ('cgroup_controllers = [ "cpu" ]\n', Level.ERROR),
        ('user = "x"\n  cgroup_controllers = [ ]  # pods\' own\n', Level.OK),
    ],
)
def test_with_the_cgroupfs_driver_libvirt_must_leave_cgroups_alone(qemu_conf: str, level: Level) -> None:
    assert machine.libvirt_cgroups(qemu_conf).level is level


def test_forwarding_that_is_off_warns_and_names_the_switch() -> None:
    found = machine.forwarding({"net.ipv4.ip_forward": "0"})
    assert found.level is Level.WARNING
    assert "net.ipv4.ip_forward = 1" in found.remedy
    assert machine.forwarding({"net.ipv4.ip_forward": "1"}).level is Level.OK


def test_not_being_root_and_a_missing_tun_are_errors() -> None:
    assert machine.root(1000).level is Level.ERROR
    assert machine.root(0).level is Level.OK
    assert machine.tun(False).level is Level.ERROR
    assert machine.tun(True).level is Level.OK


def test_a_kernel_without_vhost_net_is_a_warning_unless_vhost_is_switched_off() -> None:
    found = machine.vhost_net(True, "/dev/vhost-net: No such file or directory")
    assert (found.level, found.remedy) == (Level.WARNING, "modprobe vhost_net")
    assert "/dev/vhost-net: No such file" in found.text
    assert machine.vhost_net(True, "").level is Level.OK
    assert machine.vhost_net(False, "").level is Level.OK


def test_unreadable_forwarding_does_not_count_as_on() -> None:
    assert machine.forwarding({"net.ipv4.ip_forward": ""}).level is Level.WARNING


def test_an_unreadable_directory_for_disks_is_an_error() -> None:
    def refused(path: str) -> FreeSpace:
        raise OSError(5, "Input/output error")

    (told,) = checks.room(Settings(), refused)
    assert (told.level, told.text) == (Level.ERROR, "/var/lib/virtshim: Input/output error")


def test_a_network_configuration_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "10.conf").mkdir()
    (told,) = checks.cni(Settings.model_validate({"tapmanager": {"cni_conf_dir": str(tmp_path)}}))
    assert told.level is Level.ERROR
    assert told.text == f"{tmp_path}/10.conf: the file is empty or cannot be read"


def test_a_disk_with_too_little_space_for_saved_memory_is_reported() -> None:
    told = machine.saved_vms(1 << 30, 2 << 30)
    assert (told.level, "1.0 GiB are free" in told.text, "shut down instead of saved" in told.remedy) == (
        Level.WARNING,
        True,
        True,
    )
    for most in (0, 1 << 29):
        assert machine.saved_vms(1 << 30, most).level is Level.OK


@pytest.mark.parametrize(
    ("key", "level", "text"),
    [
        (None, Level.OK, "saved VMs stay on this node"),
        (b"short", Level.WARNING, "must have 32 to 4096 bytes"),
        (b"k" * 32, Level.OK, "can move to nodes with the same key"),
    ],
)
def test_the_check_says_whether_saved_vms_can_move(tmp_path: Path, key: bytes | None, level: Level, text: str) -> None:
    file = tmp_path / "key"
    if key is not None:
        file.write_bytes(key)
        file.chmod(0o600)
    settings = Settings.model_validate({"saved": {"key_file": str(file) if key is not None else ""}})
    _, told = checks.saved_vms(settings, lambda path: FreeSpace(path, GIB, None))
    assert (told.level, text in told.text) == (level, True)
    assert (told.remedy == "") == (level is Level.OK)


@pytest.mark.parametrize(
    ("most", "level", "text"),
    [(0, Level.OK, "boot"), (GIB, Level.OK, "1.0 GiB at most"), (3 * GIB, Level.WARNING, "more than half")],
)
def test_templates_should_leave_memory_to_pods(most: int, level: Level, text: str) -> None:
    told = machine.templates(4 * GIB, most)
    assert told.level is level
    assert text in told.text


def test_a_running_virtshim_tells_which_images_have_templates_and_which_boot_and_why() -> None:
    assert [one.text for one in machine.kept_templates([], [])] == ["no template is made yet"]
    kept = [{"image": image, "bytes": GIB // 2} for image in ("web", "web", "db")]
    unfit = [{"image": "bad\nimage", "why": "no guest agent has answered"}]
    found, boots = machine.kept_templates(kept, unfit)
    assert (found.level, found.text) == (Level.OK, "3 templates of 1.5 GiB: web, db")
    assert (boots.level, boots.text) == (Level.WARNING, "bad\\nimage boots: no guest agent has answered")
    assert boots.remedy


def test_many_images_with_and_without_templates_are_a_few_lines() -> None:
    kept = [{"image": f"i{number}", "bytes": 0} for number in range(7)]
    first, *rest = machine.kept_templates(kept, [{"image": "x", "why": "y"}] * 8)
    assert first.text.endswith("i0, i1, i2, i3, i4 and 2 more")
    assert [one.text for one in rest] == ["x boots: y"] * 5 + ["3 further machines boot"]
