"""systemd reads the unit files as on a node, with its own tools, on copies whose programs exist."""

import configparser
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from virtshim.config.settings import Settings
from virtshim.images.confinement import OWN_USER
from virtshim.preflight.node_checks import AGENT_KUBECONFIG

pytestmark = pytest.mark.operator

SERVICES = (
    "virtshim.service",
    "tapmanager.service",
    "virtshim-shares.service",
    "virtshim-device-plugin.service",
    "virtshim-proxy.service",
    "virtshim-agent.service",
)
# Each of these settings gives a service a mount namespace of its own (systemd.exec(5)).
PRIVATE_MOUNTS = {
    "BindPaths",
    "BindReadOnlyPaths",
    "DynamicUser",
    "ExecPaths",
    "ExtensionDirectories",
    "ExtensionImages",
    "InaccessiblePaths",
    "LogNamespace",
    "MountAPIVFS",
    "MountFlags",
    "MountImages",
    "NoExecPaths",
    "PrivateDevices",
    "PrivateIPC",
    "PrivateMounts",
    "PrivateTmp",
    "ProcSubset",
    "ProtectControlGroups",
    "ProtectHome",
    "ProtectKernelLogs",
    "ProtectKernelModules",
    "ProtectKernelTunables",
    "ProtectProc",
    "ProtectSystem",
    "ReadOnlyPaths",
    "ReadWritePaths",
    "RootDirectory",
    "RootImage",
    "TemporaryFileSystem",
}

System = Callable[[Sequence[str]], str]


@pytest.fixture(scope="session")
def units(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.rootpath / "systemd"


@pytest.fixture
def said() -> System:
    """Both output streams of one of systemd's tools, which must be installed and end with 0."""

    def run(argv: Sequence[str]) -> str:
        if shutil.which(argv[0]) is None:
            pytest.skip(f"NOT TESTED: {argv[0]} is not installed")
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return (done.stdout + done.stderr).strip()

    return run


GUESTS = "virtshim-guests.service"


@pytest.fixture
def copies(units: Path, tmp_path: Path) -> list[str]:
    """The units with existing programs, because systemd-analyze looks for them."""
    out = []
    for name in (*SERVICES, GUESTS):
        text = (units / name).read_text()
        for program in ("virtshim", "tapmanager", "virtshim-shares"):
            text = text.replace(f"ExecStart=/usr/local/bin/{program} ", f"ExecStart={shutil.which('true')} ")
        (tmp_path / name).write_text(text)
        out.append(str(tmp_path / name))
    shutil.copy(units / "tapmanager.socket", tmp_path)
    return [*out, str(tmp_path / "tapmanager.socket")]


def options(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # the library's own way to keep upper case
    parser.read(path)
    return parser


def test_systemd_finds_nothing_wrong_with_the_units(said: System, copies: list[str]) -> None:
    assert said(["systemd-analyze", "verify", "--man=no", *copies]) == ""


@pytest.mark.parametrize(
    ("service", "most"),
    [
        ("virtshim.service", 36),
        ("tapmanager.service", 70),
        ("virtshim-shares.service", 75),
        ("virtshim-proxy.service", 22),
        ("virtshim-agent.service", 22),
        (GUESTS, 15),
    ],
)
def test_the_exposure_of_a_service_is_within_its_limit(
    said: System, copies: list[str], service: str, most: int
) -> None:
    """`most` is in tenths of systemd's exposure level."""
    unit = next(path for path in copies if path.endswith(service))
    said(["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={most}", unit])


@pytest.mark.parametrize("service", SERVICES)
def test_stopping_a_service_ends_only_its_own_process(units: Path, service: str) -> None:
    """VMs and pod networks survive the restart of either."""
    unit = options(units / service)["Service"]
    assert unit["KillMode"] == "process"
    assert "RuntimeDirectory" not in unit, "systemd would remove the sockets of running VMs"
    assert "StateDirectory" not in unit, "tmpfiles.d makes it, with a mode that lets QEMU pass"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_notifies_systemd_and_is_always_restarted(units: Path, service: str) -> None:
    parsed = options(units / service)
    assert parsed["Service"]["Type"] == "notify"
    assert int(parsed["Service"]["WatchdogSec"]) > 0
    assert parsed["Service"]["Restart"] == "always"
    assert parsed["Unit"]["StartLimitIntervalSec"] == "0"


def test_tapmanager_shares_the_hosts_mounts_so_others_see_its_namespaces(units: Path) -> None:
    assert PRIVATE_MOUNTS & set(options(units / "tapmanager.service")["Service"]) == set()


def test_the_share_program_sees_the_hosts_mounts_and_guests_may_make_setgid_directories(units: Path) -> None:
    service = options(units / "virtshim-shares.service")["Service"]
    assert PRIVATE_MOUNTS & set(service) == set()
    assert "RestrictSUIDSGID" not in service
    assert {"mnt", "pid", "net", "user", "ipc", "uts"} == set(service["RestrictNamespaces"].split())
    assert {"AF_UNIX", "AF_NETLINK", "AF_INET", "AF_INET6"} == set(service["RestrictAddressFamilies"].split())
    assert not {"CAP_MKNOD", "CAP_SETFCAP"} & set(service["CapabilityBoundingSet"].split())


def test_virtshim_starts_after_tapmanager_and_libvirt_but_does_not_stop_with_them(units: Path) -> None:
    unit = options(units / "virtshim.service")["Unit"]
    assert {"tapmanager.service", "libvirtd.service", "virtqemud.service"} <= set(unit["After"].split())
    assert "tapmanager.service" in unit["Wants"].split()
    assert {"Requires", "BindsTo", "PartOf"} & set(unit) == set()
    assert "virtshim.service" in options(units / "tapmanager.service")["Unit"]["Before"].split()


def test_nothing_depends_on_the_agent_and_the_agent_ends_with_nothing(units: Path) -> None:
    for other in units.glob("*.service"):
        if other.name != "virtshim-agent.service":
            assert "virtshim-agent" not in other.read_text()
    unit = options(units / "virtshim-agent.service")["Unit"]
    assert {"Requires", "BindsTo", "PartOf"} & set(unit) == set()
    assert "virtshim.service" not in unit["Wants"].split()
    assert unit["ConditionPathExists"] == AGENT_KUBECONFIG


def test_the_agent_may_write_translation_files_and_has_no_capability(said: System, units: Path, tmp_path: Path) -> None:
    service = options(units / "virtshim-agent.service")["Service"]
    (writable,) = service["ReadWritePaths"].split()
    assert (writable, service["ProtectSystem"]) == (Settings().images.translations_dir, "strict")
    assert service["CapabilityBoundingSet"] == ""
    if os.geteuid() == 0:
        said(["systemd-tmpfiles", f"--root={tmp_path}", "--create", str(units / "virtshim-tmpfiles.conf")])
        assert stat.S_IMODE((tmp_path / writable.lstrip("/")).stat().st_mode) == 0o755


def test_at_shutdown_kubelet_stops_first_and_virtshim_before_remaining_vms(units: Path) -> None:
    """systemd stops units in the reverse of their order."""
    deploy = units.parent / "deploy"
    assert "virtshim.service" in options(deploy / "kubelet/virtshim-systemd.conf")["Unit"]["After"].split()
    assert "libvirt-guests.service" in options(units / "virtshim.service")["Unit"]["After"].split()
    saving = options(units / GUESTS)
    assert "virtshim.service" in saving["Unit"]["After"].split()
    assert "kubelet.service" in saving["Unit"]["Before"].split()
    within = int(saving["Service"]["ExecStop"].split("--seconds ")[1].rstrip('"'))
    assert within + 60 < int(saving["Service"]["TimeoutStopSec"])
    guests = dict(
        line.split("=") for line in (deploy / "libvirt-guests.conf").read_text().splitlines() if line[0] != "#"
    )
    assert (guests["ON_SHUTDOWN"], guests["ON_BOOT"]) == ("shutdown", "ignore")
    assert int(guests["PARALLEL_SHUTDOWN"]) > 0, "one after another"


@pytest.mark.parametrize(("state", "called"), [("stopping", "save --all --seconds 240"), ("running", ""), ("", "")])
def test_vms_are_saved_only_while_the_system_shuts_down(units: Path, tmp_path: Path, state: str, called: str) -> None:
    """What systemd makes of the line: quotes are its own, and `$$` is a dollar sign."""
    programs = {"systemctl": f"echo {state}", "virtshim": f'echo "$@" > {tmp_path}/called'}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    line = options(units / GUESTS)["Service"]["ExecStop"].replace("/usr/local/bin/virtshim", f"{tmp_path}/virtshim")
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(shlex.split(line.replace("$$", "$")), env=path, check=True, timeout=30)
    there = tmp_path / "called"
    assert (there.read_text().strip() if there.exists() else "") == called


@pytest.mark.parametrize("name", ["90-virtshim.conf", "91-virtshim-proxy.conf"])
def test_logind_waits_while_kubelet_stops_pods(said: System, units: Path, name: str) -> None:
    deploy = units.parent / "deploy/kubelet"
    kubelet = yaml.safe_load((deploy / name).read_text())
    logind = options(deploy / "virtshim-logind.conf")["Login"]["InhibitDelayMaxSec"]
    whole, critical = kubelet["shutdownGracePeriod"], kubelet["shutdownGracePeriodCriticalPods"]
    assert seconds(said, critical) < seconds(said, whole) <= seconds(said, logind)


def seconds(said: System, duration: str) -> float:
    """The seconds, as systemd reads the value."""
    found = re.search(r"μs: (\d+)", said(["systemd-analyze", "timespan", duration]))
    assert found is not None
    return int(found[1]) / 1e6


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can make directories that belong to root")
def test_qemu_can_traverse_but_not_list_the_directories(said: System, units: Path, tmp_path: Path) -> None:
    said(["systemd-tmpfiles", f"--root={tmp_path}", "--create", str(units / "virtshim-tmpfiles.conf")])
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode)
        for top in ("run/virtshim", "var/lib/virtshim")
        for path in (tmp_path / top, *(tmp_path / top).iterdir())
    }
    assert modes == {
        "run/virtshim": 0o711,
        "run/virtshim/vm": 0o711,
        "run/virtshim/shares": 0o711,
        "var/lib/virtshim": 0o711,
        "var/lib/virtshim/images": 0o711,
        "var/lib/virtshim/containers": 0o711,
        "var/lib/virtshim/tapmanager": 0o700,
    }


def test_the_group_of_the_kvm_device_is_created_if_missing(said: System, units: Path, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    out = said(["systemd-sysusers", f"--root={tmp_path}", "--dry-run", str(units / "virtshim-sysusers.conf")])
    assert "kvm" in out


@pytest.mark.hostile
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root makes users")
def test_the_user_that_reads_images_is_created_once_and_owns_nothing(said: System, units: Path, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for _ in range(2):
        said(["systemd-sysusers", f"--root={tmp_path}", str(units / "virtshim-sysusers.conf")])
    users = [line.split(":") for line in (tmp_path / "etc/passwd").read_text().splitlines()]
    ((_, _, uid, _, _, home, shell),) = [user for user in users if user[0] == OWN_USER]
    assert (uid != "0", home, shell) == (True, "/", "/usr/sbin/nologin")
    groups = [line.split(":") for line in (tmp_path / "etc/group").read_text().splitlines()]
    assert [name for name, _, _, members in groups if OWN_USER in members] == []


def test_machine_setup_creates_the_user_that_reads_images(units: Path) -> None:
    steps = (units.parent / "deploy/setup.sh").read_text()
    assert f"getent passwd {OWN_USER}" in steps
    assert 'systemd-sysusers "$PWD/systemd/virtshim-sysusers.conf"' in steps


@pytest.mark.hostile
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_uses_too_much_memory_is_killed_before_the_node_runs_out(units: Path, service: str) -> None:
    """The OOM killer spares all of them when the node's memory runs out."""
    found = options(units / service)["Service"]
    assert -1000 < int(found["OOMScoreAdjust"]) <= -900, "never -1000: then not even its own limit ends it"
    assert 0 < in_bytes(found["MemoryHigh"]) < in_bytes(found["MemoryMax"]) <= 3 << 30
    assert found["Restart"] == "always"


@pytest.mark.hostile
@pytest.mark.parametrize("service", ["virtshim.service", "tapmanager.service"])
def test_an_oom_killed_child_does_not_end_its_service(units: Path, service: str) -> None:
    assert options(units / service)["Service"]["OOMPolicy"] == "continue"


def in_bytes(size: str) -> int:
    return int(size[:-1]) << {"M": 20, "G": 30}[size[-1]]


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root has capabilities to lose")
def test_virtshims_capabilities_suffice_to_count_open_files_of_other_users(units: Path) -> None:
    names = options(units / "virtshim.service")["Service"]["CapabilityBoundingSet"].split()
    bounds = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in names)])
    look = "import sys; from virtshim.vm import qemu_process as it; use = it.usage_of(int(sys.argv[1]))"
    look += "; print(use.descriptors, use.sockets)"
    other = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "cat")
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            command = ("setpriv", f"--bounding-set={bounds}", sys.executable, "-c", look, str(process.pid))
            done = subprocess.run(command, cwd=units.parent, capture_output=True, text=True, check=False)
        finally:
            process.kill()
    assert done.stdout.strip() == "3 None", done.stderr
