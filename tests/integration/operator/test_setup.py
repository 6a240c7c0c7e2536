"""`virtshim setup` writes files that kubelet, libvirt, virtshim and systemd can read, on directory trees of nodes."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapmanager import settings as tapmanager_settings
from virtshim.cli.setup import SetupOptions, setup_command
from virtshim.config.settings import Settings, load_settings
from virtshim.devices.host_files import HostFiles
from virtshim.model.errors import Aborted, DeadlineExceeded, InternalError, InvalidRequest
from virtshim.neighbours import kubelet
from virtshim.setup.changes import DIRECTORY, LOCK
from virtshim.setup.node_setup import NodeSetup
from virtshim.setup.tree import NodeTree
from virtshim.setup.units import Systemctl
from virtshim.system.files import lock_file

pytestmark = pytest.mark.operator

UNITS = (
    "tapmanager.service", "virtshim-shares.service", "virtshim.service", "virtshim-guests.service", "virtshim-proxy.service",
)  # fmt: skip
KUBEADM = """[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
"""
NODE = {
    "/usr/bin/qemu-system-x86_64": "",
    "/usr/bin/containerd": "",
    "/usr/sbin/libvirtd": "",
    "/usr/libexec/virtshim/vmwrapper": "",
    "/run/systemd/system/any": "",
    "/run/containerd/containerd.sock": "",
    "/etc/cni/net.d/10-calico.conflist": "{}",
    "/etc/crictl.yaml": "runtime-endpoint: unix:///run/containerd/containerd.sock\n",
    "/etc/libvirt/libvirtd.conf": '# comments\n#unix_sock_ro_perms = "0777"\n',
    "/etc/containerd/config.toml": """version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
""",
    "/etc/kubernetes/kubelet.conf": "kind: Config\n",
    "/var/lib/kubelet/config.yaml": "kind: KubeletConfiguration\ncgroupDriver: systemd\n",
    "/var/lib/kubelet/kubeadm-flags.env": 'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/containerd/containerd.sock"\n',
    "/usr/lib/systemd/system/kubelet.service": "[Service]\nExecStart=/usr/bin/kubelet\n",
    "/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf": KUBEADM,
}


@pytest.fixture
def root(tmp_path: Path, pytestconfig: pytest.Config) -> Path:
    """A node of kubeadm with containerd, and virtshim's package."""
    root = tmp_path / "node"
    for path, text in NODE.items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (root / "var/lib/virtshim").mkdir()
    for unit in UNITS:
        shutil.copy(pytestconfig.rootpath / "systemd" / unit, root / "usr/lib/systemd/system")
    (root / "etc/systemd/system").mkdir(parents=True)
    return root


def seen(root: Path) -> dict[str, tuple[int, str | bytes]]:
    """Of each file and directory: its mode, and its link target or contents."""
    found: dict[str, tuple[int, str | bytes]] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if not name.startswith(DIRECTORY.lstrip("/")):
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
            found[name] = (path.lstat().st_mode, content)
    return found


def run(root: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, dict[str, Any]]:
    code = setup_command(SetupOptions(str(root), as_json=True, **options))
    return code, json.loads(capsys.readouterr().out)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: wants root")


@needs_root
def test_a_kubeadm_node_with_containerd_is_set_up_and_restored_exactly(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = seen(root)
    code, told = run(root, capsys)
    assert (code, told["problems"], told["failed"]) == (0, [], [])
    assert [(key, one["value"]) for key, one in told["settings"].items()] == [("vm.require_overhead", True)]
    assert told["units"]["enabled"] == [*UNITS]
    assert {one["path"]: one["action"] for one in told["files"]} == {
        "/etc/virtshim/config.toml": "create",
        "/etc/virtshim/runtimeclass.yaml": "create",
        "/etc/crictl.yaml": "replace",
        "/etc/virtshim/config.toml.d/proxy.toml": "create",
        "/etc/kubernetes/kubelet.conf.d/91-virtshim-proxy.conf": "create",
        "/etc/systemd/system/kubelet.service.d/virtshim-proxy.conf": "create",
        "/etc/systemd/system/kubelet.service.d/zz-virtshim-flags.conf": "create",
        "/etc/containerd/config.toml": "replace",
        "/etc/libvirt/libvirtd.conf": "replace",
        "/etc/systemd/logind.conf.d/virtshim.conf": "create",
    }

    found = kubelet.read(HostFiles(str(root)))
    assert found.endpoint is not None
    assert found.endpoint.value == "unix:///run/virtshim/proxy.sock"
    assert found.fields["containerRuntimeEndpoint"].value == "unix:///run/virtshim/proxy.sock"
    assert found.flags["node-labels"].value == "virtshim.io/vms=true"
    file = str(root / "etc/virtshim/config.toml")
    assert load_settings(file) == Settings(vm={"require_overhead": True})
    assert tapmanager_settings.load(["--config", file]) == tapmanager_settings.load([])
    assert (root / "etc/systemd/system/multi-user.target.wants/virtshim-proxy.service").is_symlink()

    after = seen(root)
    code, told = run(root, capsys)
    assert {one["action"] for one in told["files"]} == {"same"}
    assert not any(told["units"].values())
    assert seen(root) == after

    code, told = run(root, capsys, undo=True)
    assert code == 0
    assert told["units"]["disabled"] == [*UNITS]
    label, restart = told["next"]
    assert label.startswith(f"kubectl label node {socket.gethostname().lower()} virtshim.io/vms-   # otherwise")
    assert restart == "systemctl restart kubelet   # kubelet calls its former runtime again"
    left = seen(root)
    # systemctl leaves the directory of links.
    assert left.keys() - before.keys() <= {"etc/systemd/system/multi-user.target.wants"}
    assert {path: left[path] for path in before} == before


@needs_root
def test_a_node_for_vms_only_has_its_taint_and_label_named_both_ways(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "var/lib/kubelet/kubeadm-flags.env").write_text("KUBELET_KUBEADM_ARGS=--hostname-override=one\n")
    code, told = run(root, capsys, vms_only=True)
    assert code == 0
    commands = [step.partition("   #")[0] for step in told["next"]]
    assert "kubectl taint nodes one virtshim.io/vms=true:NoSchedule --overwrite" in commands
    assert "kubectl label node one virtshim.io/vms=true" in commands

    code, told = run(root, capsys, undo=True)
    assert code == 0
    assert [step.partition("   #")[0] for step in told["next"]] == [
        "kubectl label node one virtshim.io/vms-",
        "kubectl taint nodes one virtshim.io/vms-",
        "systemctl restart kubelet",
    ]


@needs_root
def test_setup_refuses_a_containerd_with_another_cgroup_driver_than_kubelets(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "etc/containerd/config.toml").write_text("version = 2\n")
    before = seen(root)
    assert setup_command(SetupOptions(str(root))) == 1
    told = capsys.readouterr().out
    assert "problem   containerd has cgroup driver cgroupfs, its default, but this node uses systemd" in told
    assert 'SystemdCgroup = true below [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]' in told
    assert "nothing was changed; setup changes nothing until the first problem is solved\n" in told
    assert seen(root) == before
    assert not (root / DIRECTORY.lstrip("/")).exists()
    code, said = run(root, capsys, dry_run=True)
    assert (code, said["files"], said["next"]) == (1, [], [])
    code, said = run(root, capsys, vms_only=True)
    assert (code, said["problems"]) == (0, [])


@needs_root
def test_a_dry_run_shows_a_diff_and_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = seen(root)
    assert setup_command(SetupOptions(str(root), dry_run=True)) == 0
    told = capsys.readouterr().out
    assert "--- /etc/crictl.yaml\n+++ /etc/crictl.yaml\n" in told
    assert "-runtime-endpoint: unix:///run/containerd/containerd.sock\n" in told
    assert "+runtime-endpoint: unix:///run/virtshim/proxy.sock\n" in told
    assert "--- /dev/null\n+++ /etc/virtshim/config.toml\n" in told
    assert told.endswith("nothing was changed, because of --dry-run\n")
    assert seen(root) == before
    assert not (root / DIRECTORY.lstrip("/")).exists()

    setup_command(SetupOptions(str(root)))
    after = seen(root)
    capsys.readouterr()
    assert setup_command(SetupOptions(str(root), dry_run=True, undo=True)) == 0
    assert "+++ /dev/null\n" in capsys.readouterr().out
    assert seen(root) == after


@needs_root
def test_later_changes_of_the_operator_are_kept_and_named_with_exit_code_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(root, capsys)
    (root / "etc/crictl.yaml").write_text("mine\n")
    for options in ({}, {"undo": True}):
        assert setup_command(SetupOptions(str(root), **options)) == 1
        assert "kept      /etc/crictl.yaml   it was changed since setup wrote it" in capsys.readouterr().out
    assert (root / "etc/crictl.yaml").read_text() == "mine\n"


@needs_root
def test_the_operators_settings_are_left_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "etc/virtshim").mkdir()
    (root / "etc/virtshim/config.toml").write_text('[paths]\nrun_dir = "/run/mine"\n')
    code, _ = run(root, capsys)
    assert code == 1
    assert "unix:///run/mine/proxy.sock" in (root / "etc/crictl.yaml").read_text()
    run(root, capsys, undo=True)
    assert (root / "etc/virtshim/config.toml").read_text() == '[paths]\nrun_dir = "/run/mine"\n'
    (root / "etc/virtshim/config.toml").write_text("[paths]\nrun_dri = 1\n")
    with pytest.raises(InvalidRequest, match=r"paths\.run_dri"):
        run(root, capsys)


@needs_root
def test_setup_replaces_the_empty_file_of_tmpfiles(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "etc/virtshim").mkdir()
    (root / "etc/virtshim/config.toml").touch()
    code, _ = run(root, capsys)
    assert code == 0
    assert "virtshim setup" in (root / "etc/virtshim/config.toml").read_text()
    run(root, capsys, undo=True)
    assert (root / "etc/virtshim/config.toml").read_text() == ""


class Running(Systemctl):
    """A running system; one unit does not start, another hangs."""

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.runs = True
        self.asked: list[str] = []
        self.enabled: set[str] = set()

    def state(self, unit: str) -> str:
        return "masked" if unit == "libvirtd-ro.socket" else "enabled" if unit in self.enabled else "disabled"

    def is_active(self, unit: str) -> bool:
        return unit in self.enabled and unit != "virtshim.service"

    def is_idle(self, unit: str) -> bool:
        return unit not in ("libvirtd.service", "systemd-logind.service")

    def _run(self, *words: str) -> None:
        self.asked.append(" ".join(words))
        if words[0] == "enable":
            self.enabled.add(words[-1])
        if words[-1] == "virtshim.service":
            raise DeadlineExceeded("systemctl took longer than 330 s")
        if words[-1] == "systemd-logind.service":
            raise InternalError("no bus")


@needs_root
def test_services_start_in_order_and_a_failing_one_does_not_block_others(root: Path) -> None:
    system = Running()
    found = NodeSetup(NodeTree(str(root)), system).set_up()
    assert found.failed == ("no bus", "systemctl took longer than 330 s")
    settle = ["daemon-reload", "kill --signal=HUP systemd-logind.service", "try-restart libvirtd.service"]
    assert system.asked == [*settle, *(f"enable --now {unit}" for unit in UNITS)]

    system.asked.clear()
    again = NodeSetup(NodeTree(str(root)), system).set_up()
    assert (again.enabled, again.started) == ((), ("virtshim.service",))
    # The failed step is pending; the others are not repeated.
    assert again.pending == ("kill --signal=HUP systemd-logind.service",)
    assert system.asked == [*again.pending, "enable --now virtshim.service"]


@needs_root
def test_two_concurrent_setups_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(root, capsys)
    held = lock_file(str(root / LOCK.lstrip("/")))
    try:
        with pytest.raises(Aborted, match="another virtshim setup"):
            run(root, capsys)
    finally:
        os.close(held)


@needs_root
def test_systemd_accepts_the_written_unit_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT TESTED: systemd-analyze is not installed")
    run(root, capsys)
    shown = subprocess.run(
        ["systemd-analyze", f"--root={root}", "cat-config", "systemd/system/kubelet.service"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    for name in ("virtshim-proxy.conf", "zz-virtshim-flags.conf"):
        assert f"/etc/systemd/system/kubelet.service.d/{name}" in shown.stdout, shown.stderr


def test_a_missing_root_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is not a directory"):
        setup_command(SetupOptions(str(tmp_path / "none")))


def test_the_command_ends_with_an_exit_code_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "virtshim", "setup", "--dry-run", "--root", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "problem   QEMU is missing" in done.stdout
    assert done.stderr == ""
