"""If set-up is killed anywhere, the next run does what is pending, and every daemon rereads the files that changed."""

import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from virtshim.model.errors import InternalError
from virtshim.setup import changes
from virtshim.setup.changes import DIRECTORY
from virtshim.setup.node_setup import NodeSetup, Outcome
from virtshim.setup.tree import NodeTree
from virtshim.setup.units import Systemctl

pytestmark = pytest.mark.operator

OURS = ("tapmanager.service", "virtshim-shares.service", "virtshim.service", "virtshim-proxy.service")
# The readers of each file, and when they read it.
READERS = {
    "systemd": ("/etc/systemd/system",),
    "systemd-logind.service": ("/etc/systemd/logind.conf.d",),
    "apparmor.service": ("/etc/apparmor.d",),
    "libvirtd.service": ("/etc/libvirt",),
    **dict.fromkeys(OURS, ("/etc/virtshim/config.toml", "/etc/virtshim/config.toml.d")),
}
NODE = {
    "/usr/bin/qemu-system-x86_64": "",
    "/usr/bin/containerd": "",
    "/usr/sbin/libvirtd": "",
    "/usr/lib/virtshim/vmwrapper": "",
    "/run/systemd/system/any": "",
    "/run/containerd/containerd.sock": "",
    "/etc/containerd/config.toml": """version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
""",
    "/etc/cni/net.d/10-calico.conflist": "{}",
    "/etc/libvirt/libvirtd.conf": "log_level = 3\n",
    "/etc/apparmor.d/usr.sbin.libvirtd": "profile\n",
    "/etc/apparmor.d/local/usr.sbin.libvirtd": "",
    "/usr/lib/systemd/system/kubelet.service": "[Service]\nExecStart=/usr/bin/kubelet $KUBELET_EXTRA_ARGS\n",
    "/usr/lib/systemd/system/libvirtd-ro.socket": "",
    "/var/lib/virtshim/any": "",
    "/etc/systemd/system/any": "",
    **{f"/usr/lib/systemd/system/{unit}": "" for unit in OURS},
}


class Killed(BaseException):
    """As SIGKILL: nobody catches it."""


class Life:
    """Ends before its n-th effect; 0: never."""

    def __init__(self, at: int = 0) -> None:
        self._left = at

    def step(self, effect: Callable[[], object]) -> None:
        self._left -= 1
        if self._left == 0:
            raise Killed
        effect()


class Tree(NodeTree):
    life = Life()

    def write(self, path: str, content: bytes, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
        self.life.step(lambda: super(Tree, self).write(path, content, mode, owner))

    def remove(self, path: str) -> None:
        self.life.step(lambda: super(Tree, self).remove(path))

    def make_directory(self, path: str, mode: int = 0o755) -> None:
        self.life.step(lambda: super(Tree, self).make_directory(path, mode))

    def remove_directory(self, path: str) -> None:
        self.life.step(lambda: super(Tree, self).remove_directory(path))


class Machine(Systemctl):
    """systemd and its services, with what each has read of its files. `refuses`: words that fail."""

    def __init__(self, root: Path) -> None:
        super().__init__("/nowhere")
        self.runs = True
        self.life = Life()
        self.refuses: set[str] = set()
        self.enabled = {"libvirtd.service", "systemd-logind.service", "libvirtd-ro.socket"}
        self.active = {"libvirtd.service", "systemd-logind.service", "apparmor.service", "libvirtd-ro.socket"}
        self.masked: set[str] = set()
        self._root = root
        self.read = {who: self._files(who) for who in READERS}

    @property
    def can_change(self) -> bool:
        return True

    @property
    def state_of_units(self) -> tuple[frozenset[str], ...]:
        return tuple(frozenset(one) for one in (self.enabled, self.active, self.masked))

    def stale(self) -> list[str]:
        """Who has read what is not there any more."""
        up = {"systemd", *self.active}
        return [who for who, files in self.read.items() if who in up and files != self._files(who)]

    def state(self, unit: str) -> str:
        return "masked" if unit in self.masked else "enabled" if unit in self.enabled else "disabled"

    def is_active(self, unit: str) -> bool:
        return unit in self.active

    def is_idle(self, unit: str) -> bool:
        return unit not in self.active

    def change(self, verb: str, unit: str) -> None:
        """`enable` and `mask` have two steps, and a kill may come between them."""
        self._run(verb, unit)
        if verb in ("enable", "mask"):
            self._run("start" if verb == "enable" else "stop", unit)

    def _run(self, *words: str) -> None:
        if " ".join(words) in self.refuses:
            raise InternalError(f"systemctl {' '.join(words)}: no")
        self.life.step(lambda: self._done(words[0], words[-1]))

    def _done(self, verb: str, unit: str) -> None:
        if verb in ("enable", "disable"):
            (self.enabled.add if verb == "enable" else self.enabled.discard)(unit)
        elif verb in ("mask", "unmask"):
            (self.masked.add if verb == "mask" else self.masked.discard)(unit)
        elif verb == "stop":
            self.active.discard(unit)
        else:
            who = "systemd" if verb == "daemon-reload" else unit
            self.read[who] = self._files(who)
            if verb == "start":
                self.active.add(unit)
            if who == "libvirtd.service" and "libvirtd-ro.socket" not in self.masked:
                self.active.add("libvirtd-ro.socket")

    def _files(self, who: str) -> Mapping[str, bytes]:
        places = [self._root / path.lstrip("/") for path in READERS.get(who, ())]
        files = [file for place in places for file in (place, *place.rglob("*")) if file.is_file()]
        return {str(file): file.read_bytes() for file in files}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in NODE.items():
        place = tmp_path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return tmp_path


@pytest.fixture(autouse=True)
def anybody_is_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set-up is tried at thousands of points, by any user, and in directories of its own."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)  # nothing here pulls the plug
    monkeypatch.setattr("virtshim.setup.node_setup.lock_file", lambda _path: os.open("/dev/null", os.O_RDONLY))


def node(root: Path, machine: Machine, life: Life | None = None) -> NodeSetup:
    tree = Tree(str(root))
    tree.life = machine.life = life or Life()
    return NodeSetup(tree, machine)


def seen(root: Path) -> dict[str, bytes | None]:
    paths = [path for path in sorted(root.rglob("*")) if DIRECTORY not in f"/{path.relative_to(root)}"]
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in paths}


def killed(work: Callable[[], Outcome]) -> bool:
    try:
        work()
    except Killed:
        return True
    return False


def test_a_set_up_killed_anywhere_is_completed_by_the_next(root: Path) -> None:
    whole, units = None, None
    for at in itertools.count(1):
        machine = Machine(root)
        before, units_before = seen(root), machine.state_of_units
        died = killed(node(root, machine, Life(at)).set_up)
        found = node(root, machine).set_up()
        assert (found.failed, machine.stale()) == ((), []), at
        whole, units = whole or seen(root), units or machine.state_of_units
        assert (seen(root), machine.state_of_units) == (whole, units), at
        assert node(root, machine).planned().changes_nothing, at
        assert node(root, machine).undo().failed == ()
        assert (seen(root), machine.state_of_units, machine.stale()) == (before, units_before, []), at
        assert not (root / DIRECTORY.lstrip("/")).exists(), at
        if not died:
            assert at > 30
            break


def test_a_set_up_after_an_undo_killed_anywhere_can_be_undone(
    root: Path,
) -> None:
    for at in itertools.count(1):
        machine = Machine(root)
        before, units = seen(root), machine.state_of_units
        node(root, machine).set_up()
        died = killed(node(root, machine, Life(at)).undo)
        assert node(root, machine).set_up().failed == ()
        assert machine.stale() == [], at
        assert node(root, machine).undo().failed == ()
        assert (seen(root), machine.state_of_units, machine.stale()) == (before, units, []), at
        if not died:
            break


def test_an_undo_killed_anywhere_is_completed_by_the_next(root: Path) -> None:
    for at in itertools.count(1):
        machine = Machine(root)
        before, units = seen(root), machine.state_of_units
        node(root, machine).set_up()
        died = killed(node(root, machine, Life(at)).undo)
        assert node(root, machine).undo().failed == ()
        assert (seen(root), machine.state_of_units, machine.stale()) == (before, units, []), at
        assert not (root / DIRECTORY.lstrip("/")).exists()
        if not died:
            assert at > 30
            break


def test_a_refused_systemctl_call_is_repeated_by_the_next_run(root: Path) -> None:
    machine = Machine(root)
    machine.refuses = {"try-restart libvirtd.service", "daemon-reload"}
    refused = ("systemctl daemon-reload: no", "systemctl try-restart libvirtd.service: no")
    assert node(root, machine).set_up().failed == refused
    assert node(root, machine).set_up().failed == refused
    assert machine.stale() == ["systemd", "libvirtd.service"]
    machine.refuses = set()
    found = node(root, machine).set_up()
    assert found.pending == ("daemon-reload", "try-restart libvirtd.service")
    assert (found.failed, machine.stale()) == ((), [])
    machine.refuses = {"daemon-reload"}
    assert node(root, machine).undo().failed == refused[:1]
    machine.refuses = set()
    assert node(root, machine).undo().failed == ()
    assert machine.stale() == []


def test_changed_settings_reach_running_daemons(root: Path) -> None:
    """containerd came later, say."""
    machine = Machine(root)
    node(root, machine).set_up(vms_only=True)
    node(root, machine).set_up(vms_only=False)
    assert "virtshim-proxy.service" in machine.active
    assert machine.stale() == []


def test_a_vms_only_node_stays_one_until_changed_and_has_no_proxy(root: Path) -> None:
    machine = Machine(root)
    node(root, machine).set_up()
    assert "virtshim-proxy.service" in machine.active
    found = node(root, machine).set_up(vms_only=True)
    assert found.stopped == found.disabled == ("virtshim-proxy.service",)
    assert not {"virtshim-proxy.service"} & (machine.active | machine.enabled)
    assert not (root / "etc/virtshim/config.toml.d/proxy.toml").exists()
    assert node(root, machine).planned().changes_nothing
    assert "virtshim-proxy.service" in node(root, machine).set_up(vms_only=False).enabled


def test_units_that_ran_before_set_up_run_after_its_undo(root: Path) -> None:
    (root / "usr/lib/systemd/system/containerd.service").touch()
    machine = Machine(root)
    machine.active |= {"containerd.service"}
    node(root, machine).set_up()
    assert "containerd.service" in machine.enabled
    node(root, machine).undo()
    assert "containerd.service" in machine.active - machine.enabled


def test_a_masked_unit_is_reported_as_a_problem(root: Path) -> None:
    machine = Machine(root)
    (root / "usr/lib/systemd/system/libvirt-guests.service").touch()
    machine.masked |= {"virtshim.service", "libvirt-guests.service"}
    found = node(root, machine).set_up()
    assert found.plan is not None
    # VMs run without the other.
    (told,) = [problem for problem in found.plan.problems if "masked" in problem]
    assert told == "virtshim.service is masked; run systemctl unmask virtshim.service, then run this command again"


def test_a_node_without_systemd_is_told_what_to_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(root / "run/systemd")
    machine = Machine(root)
    machine.runs = False
    monkeypatch.setattr(Machine, "can_change", False)
    found = node(root, machine).set_up()
    assert found.plan is not None
    assert found.plan.problems[-1] == (
        f"systemd does not run here; start these services by other means: {', '.join(OURS)}; "
        "if it runs, restart libvirtd.service, too"
    )
    assert [one for one in (*found.plan.problems, *found.steps, *found.pending) if "systemctl" in one] == []
    assert (found.failed, found.enabled) == ((), ())


def test_an_image_has_the_cgroup_driver_of_the_systemd_that_will_run_it(root: Path) -> None:
    shutil.rmtree(root / "run/systemd")
    (root / "etc/containerd/config.toml").unlink()
    assert "cgroup driver" in (found := node(root, Machine(root)).planned().plan.seen)  # type: ignore[union-attr]
    assert found["cgroup driver"].startswith("cgroupfs")
    (root / "usr/lib/systemd/systemd").touch()
    found = node(root, Machine(root)).planned().plan.seen  # type: ignore[union-attr]
    assert found["cgroup driver"].startswith("systemd")


def test_the_manifest_of_an_earlier_version_can_be_undone(root: Path) -> None:
    machine = Machine(root)
    node(root, machine).set_up()
    file = root / DIRECTORY.lstrip("/") / "manifest.json"
    manifest = changes.read_manifest(NodeTree(str(root)))
    assert manifest.started == OURS
    lines = [line for line in file.read_text().splitlines() if '"pending"' not in line and '"vms_only"' not in line]
    text = "\n".join(lines)
    file.write_text(text[: text.index(',\n  "started"')] + "\n}")
    assert set(node(root, machine).undo().stopped) == set(OURS)


def test_pending_work_of_an_earlier_versions_set_up_is_done(root: Path) -> None:
    machine = Machine(root)
    machine.refuses = {"daemon-reload"}
    node(root, machine).set_up()
    file = root / DIRECTORY.lstrip("/") / "manifest.json"
    file.write_text(file.read_text().replace('"pending"', '"owed"'))
    machine.refuses = set()
    assert node(root, machine).set_up().pending == ("daemon-reload",)
    assert machine.stale() == []


def test_an_operators_socket_unit_that_would_restart_a_stopped_unit_is_reported(root: Path) -> None:
    machine = Machine(root)
    node(root, machine).set_up()
    machine.active |= {"tapmanager.socket"}
    assert node(root, machine).undo_planned().activated == ("tapmanager.socket",)
