"""The image that installs virtshim on nodes has the right contents, and its program installs and removes. A directory
tree stands for the node."""

import http.server
import json
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image import on_node
from image.on_node import LABEL, STATE, UNITS, Api, Node, Trouble

pytestmark = pytest.mark.operator

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
# A stand-in for entering the node: it runs set-up on the tree, and records all other requests.
ENTER = """\
import json, os, sys
root, *argv = sys.argv[1:]
if os.path.exists(f"{root}/breaks") and argv == open(f"{root}/breaks").read().split():
    sys.exit(9)
if argv[:2] == ["systemctl", "show"]:
    print(open(f"{root}/started").read() if os.path.exists(f"{root}/started") else "")
    sys.exit()
with open(f"{root}/asked", "a") as file:
    print(*argv, file=file)
if argv[0] == "dpkg-statoverride":
    overrides = f"{root}/var/lib/dpkg/statoverride"
    said = open(overrides).read() if os.path.exists(overrides) else ""
    if "--add" in argv:
        user, group, mode, path = argv[-4:]
        with open(overrides, "w") as file:
            print(user, group, mode.lstrip("0"), path, file=file)
    elif "--remove" in argv:
        os.unlink(overrides)
    print(said, end="")
    sys.exit(0 if said or "--add" in argv else 1)
if argv[0] == "/usr/lib/virtshim/bin/virtshim":
    if argv[1] == "check":
        print(open(f"{root}/check").read())
        if os.path.exists(f"{root}/repaired"):
            os.replace(f"{root}/repaired", f"{root}/check")
        sys.exit(1)
    if os.path.exists(f"{root}/told"):
        print(open(f"{root}/told").read())
        sys.exit()
    os.execv(sys.executable, [sys.executable, "-m", "virtshim", *argv[1:], "--root", root])
"""


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    """The parts of the package that the program reads."""
    return make_payload(tmp_path / "payload", "0.1.0 aaaa", "usr/lib/virtshim/old.py")


def make_payload(place: Path, version: str, *more: str) -> Path:
    for path in ("usr/lib/virtshim/bin/virtshim", "usr/libexec/virtshim/vmwrapper", "usr/share/doc/virtshim/README.md",
                 *(f"lib/systemd/system/{unit}" for unit in UNITS), *more):  # fmt: skip
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(f"{version}: {path}\n")
    (place / "usr/lib/virtshim/bin/virtshim").chmod(0o755)
    (place / "usr/lib/virtshim/bin/python3").symlink_to(f"../../../bin/{PYTHON}")
    (place / ".version").write_text(f"{version}\n")
    return place


@pytest.fixture
def node(tmp_path: Path, payload: Path) -> Node:
    """A node with kubelet, containerd, libvirt and QEMU; /lib is a link, as distributions have it."""
    root = tmp_path / "host"
    for path in (f"usr/bin/{PYTHON}", "usr/bin/qemu-system-x86_64", "usr/sbin/libvirtd", "usr/bin/containerd",
                 "var/lib/virtshim/mine", "run/systemd/system/any", "run/libvirt/qemu/other.pid",
                 "usr/lib/systemd/system/x.service", "etc/containerd/any", "etc/cni/net.d/10-cluster.conf"):  # fmt: skip
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("")
    (root / "lib").symlink_to("usr/lib")
    unit = "[Service]\nExecStart=/usr/bin/kubelet --config=/var/lib/kubelet/config.yaml $KUBELET_EXTRA_ARGS\n"
    (root / "usr/lib/systemd/system/kubelet.service").write_text(unit)
    (root / "var/lib/kubelet").mkdir(parents=True)
    (root / "var/lib/kubelet/config.yaml").write_text("cgroupDriver: cgroupfs\n")
    (root / "check").write_text("[]")
    (tmp_path / "enter.py").write_text(ENTER)
    return Node(root, payload, (sys.executable, str(tmp_path / "enter.py"), str(root)))


def asked(node: Node) -> list[str]:
    """The recorded calls; forgets them."""
    place = node.root / "asked"
    told = place.read_text().splitlines() if place.exists() else []
    place.unlink(missing_ok=True)
    return told


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else "/"
        for path in root.rglob("*")
        if path.name not in ("asked", "lock")
    }  # fmt: skip


def put_on(node: Node) -> list[str]:
    on_node.install(node)
    return on_node.set_up(node)


def set_up_says(node: Node, action: str = "create", **changed: list[str]) -> None:
    """Fakes a run of setup: what it did with a file of kubelet, and which findings it has."""
    file = {"path": "/etc/kubernetes/kubelet.conf.d/91-virtshim-proxy.conf", "action": action, "note": ""}
    told = {"seen": {}, "files": [file], "problems": [], "failed": [], **changed}
    (node.root / "told").write_text(json.dumps(told))


BAD = {"level": "error", "subject": "QEMU", "text": "missing", "remedy": "apt-get install", "check": "qemu"}
RESTART = "systemctl restart kubelet"
CHECK = "/usr/lib/virtshim/bin/virtshim check"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: wants root")


@needs_root
def test_installation_is_idempotent_and_removal_restores_the_node(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(node.root)
    put_on(node)
    assert (node.root / "usr/lib/systemd/system/virtshim.service").is_file()
    assert os.access(node.root / "usr/lib/virtshim/bin/virtshim", os.X_OK)
    assert os.readlink(node.root / "usr/lib/virtshim/bin/python3") == f"../../../bin/{PYTHON}"
    assert "proxy.sock" in (node.root / "etc/kubernetes/kubelet.conf.d/91-virtshim-proxy.conf").read_text()
    first = asked(node)
    assert first[:3] == [
        "systemd-sysusers virtshim.conf",
        "systemd-tmpfiles --create virtshim.conf",
        "systemctl daemon-reload",
    ]
    check = "/usr/lib/virtshim/bin/virtshim check --json"
    assert first[-4:] == [check, "systemctl daemon-reload", RESTART, check]
    assert "create /etc/kubernetes/kubelet.conf.d/91-virtshim-proxy.conf" in capsys.readouterr().out

    after = tree(node.root)
    put_on(node)
    assert tree(node.root) == after
    assert not [line for line in asked(node) if "restart" in line]

    on_node.uninstall(node)
    left = tree(node.root)
    assert {path for path in left.keys() - before.keys() if left[path] != "/"} == set()
    assert {path: left[path] for path in before} == before
    assert not (node.root / "usr/lib/virtshim").exists()
    assert asked(node)[-1] == "systemctl daemon-reload"


@needs_root
def test_another_version_replaces_the_first_and_restarts_its_services(node: Node, tmp_path: Path) -> None:
    put_on(node)
    asked(node)
    newer = Node(node.root, make_payload(tmp_path / "newer", "0.2.0 bbbb", "usr/lib/virtshim/new.py"), node.enter)
    put_on(newer)
    assert f"systemctl try-restart {' '.join(UNITS)}" in asked(node)
    assert not (node.root / "usr/lib/virtshim/old.py").exists()
    assert (node.root / "usr/lib/virtshim/new.py").read_text().startswith("0.2.0")
    on_node.uninstall(newer)
    assert not (node.root / "usr/lib/virtshim").exists()


@needs_root
def test_an_interrupted_copy_is_finished_or_removed_by_the_next_run(node: Node) -> None:
    file = node.payload / "usr/lib/virtshim/old.py"
    file.unlink()
    os.mkfifo(file)  # cannot be copied; programs come before it, documents after it
    with pytest.raises(OSError, match="named pipe"):
        put_on(node)
    assert (node.root / "usr/lib/virtshim/bin/virtshim").exists()
    assert not (node.root / "usr/share/doc/virtshim").exists()
    assert json.loads((node.root / STATE / "files.json").read_text())["version"] == ""
    file.unlink()
    file.write_text("old")
    put_on(node)
    assert (node.root / "usr/lib/virtshim/old.py").exists()
    assert (node.root / "usr/share/doc/virtshim/README.md").exists()
    on_node.uninstall(node)
    assert not (node.root / "usr/lib/virtshim").exists()


@pytest.mark.full
@needs_root
def test_the_next_run_restarts_services_that_an_interrupted_upgrade_did_not(node: Node, tmp_path: Path) -> None:
    put_on(node)
    place = make_payload(tmp_path / "newer", "0.2.0 bbbb")
    with pytest.raises(Trouble):
        put_on(Node(node.root, place, (sys.executable, "-c", "import sys; sys.exit('no bus')")))
    asked(node)
    put_on(Node(node.root, place, node.enter))
    assert f"systemctl try-restart {' '.join(UNITS)}" in asked(node)


OVERRIDE = "libvirt-qemu libvirt-qemu 751 /var/lib/libvirt/qemu\n"


def with_libvirts_directory(node: Node) -> Path:
    """Installs libvirt's directory on the node; returns dpkg's file of overrides."""
    for path in ("usr/bin/dpkg-statoverride", "var/lib/dpkg/status", "var/lib/libvirt/qemu/any"):
        (node.root / path).parent.mkdir(parents=True, exist_ok=True)
        (node.root / path).touch()
    return node.root / "var/lib/dpkg/statoverride"


def test_libvirts_directory_stays_open_for_vms_users_until_virtshim_goes(node: Node) -> None:
    """Otherwise each upgrade of Debian's libvirt closes it."""
    set_up_says(node)
    assert put_on(node) == []  # libvirt is not there yet
    overrides = with_libvirts_directory(node)
    for _ in range(2):
        assert put_on(node) == []
        assert overrides.read_text() == OVERRIDE
    assert len([line for line in asked(node) if "--add" in line]) == 1
    on_node.uninstall(node)
    assert not overrides.exists()
    assert "chmod 0750 /var/lib/libvirt/qemu" in asked(node)


@pytest.mark.full
@pytest.mark.parametrize("later", [False, True])
def test_a_dpkg_override_of_others_for_libvirts_directory_is_kept(node: Node, *, later: bool) -> None:
    overrides, theirs = with_libvirts_directory(node), OVERRIDE.replace("751", "755")
    set_up_says(node)
    if not later:
        overrides.write_text(theirs)
    put_on(node)
    overrides.write_text(theirs)
    put_on(node)
    on_node.uninstall(node)
    assert overrides.read_text() == theirs
    assert not [line for line in asked(node) if line.startswith("chmod")]


def test_a_node_with_the_package_is_left_alone(node: Node) -> None:
    (node.root / "var/lib/dpkg/info").mkdir(parents=True)
    (node.root / "var/lib/dpkg/info/virtshim.list").touch()
    with pytest.raises(Trouble, match="upgrade it with apt"):
        put_on(node)
    assert not (node.root / "usr/lib/virtshim").exists()


def test_a_node_with_its_own_units_is_left_alone(node: Node, pytestconfig: pytest.Config) -> None:
    (node.root / "etc/systemd/system").mkdir(parents=True)
    shutil.copy(pytestconfig.rootpath / "systemd/virtshim.service", node.root / "etc/systemd/system")
    with pytest.raises(Trouble, match=r"from its sources: remove /etc/systemd/system/virtshim\.service first"):
        on_node.install(node)
    assert not (node.root / "usr/lib/virtshim").exists()


def test_a_node_of_another_distribution_is_refused_before_anything_is_copied(node: Node) -> None:
    (node.root / "usr/bin" / PYTHON).unlink()
    with pytest.raises(Trouble, match=f"no /usr/bin/{PYTHON}"):
        put_on(node)
    assert not (node.root / "usr/lib/virtshim").exists()


def test_absolute_symlinks_of_the_node_do_not_lead_into_the_image(node: Node) -> None:
    (node.root / "lib").unlink()
    (node.root / "lib").symlink_to("/usr/lib")
    assert node.place("lib/systemd") == node.root / "usr/lib/systemd"
    (node.root / "up").symlink_to("../../../..")
    assert node.place("up/etc") == node.root / "etc"


def test_virtshim_is_not_removed_from_a_node_with_running_vms(node: Node) -> None:
    (node.root / "run/libvirt/qemu/virtshim-0123-web.pid").touch()
    with pytest.raises(Trouble, match=r"VMs run \(virtshim-0123-web\)"):
        on_node.uninstall(node)
    assert asked(node) == []


class Cluster(Api):
    """A cluster that keeps labels, and ends the pod when it has one."""

    def label(self, value: str | None) -> None:
        LABELS.append(value)
        STOPPED.set()


LABELS: list[str | None] = []
STOPPED = threading.Event()


@pytest.fixture
def cluster() -> Cluster:
    LABELS.clear()
    STOPPED.clear()
    return Cluster("node-1", "127.0.0.1", 1)


@needs_root
def test_a_node_is_labelled_once_a_vm_could_start_there(
    node: Node, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    (node.root / "check").write_text(json.dumps([BAD]))
    (node.root / "repaired").write_text("[]")
    on_node.install(node)
    asked(node)
    on_node.stay(node, cluster, STOPPED, then_uninstall=False, recheck=0.01)
    assert LABELS == ["true"]
    told = capsys.readouterr().out
    assert "NOT LABELLED: QEMU: missing -> apt-get install" in told
    # Everything once, except what is missing.
    assert (told.count("cgroup driver: "), told.count("create /etc/crictl.yaml")) == (1, 1)
    # Not before a VM could start.
    told_systemctl = asked(node)
    assert told_systemctl.count(RESTART) == 1
    assert told_systemctl.index(RESTART) > 2 + told_systemctl.index("/usr/lib/virtshim/bin/virtshim check --json")


def test_kubelet_is_restarted_only_after_setup_and_check_succeed(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ({"problems": ["QEMU is missing"]}, {"failed": ["virtshim.service: no"]}):
        set_up_says(node, **wrong)
        assert [put_on(node)] == list(wrong.values())
        assert "kubelet is not restarted" in capsys.readouterr().out
    set_up_says(node, "same")
    (node.root / "check").write_text(json.dumps([BAD]))
    assert put_on(node) == ["QEMU: missing -> apt-get install"]
    assert not [line for line in asked(node) if "kubelet" in line]
    # Its files are right after the first run.
    (node.root / "check").write_text("[]")
    assert put_on(node) == []
    assert RESTART in asked(node)
    assert put_on(node) == []
    assert RESTART not in asked(node)


def test_findings_that_a_kubelet_restart_may_fix_do_not_prevent_the_restart(node: Node) -> None:
    """kubelet still runs with its old driver, for example; a VM cannot start until the restart."""
    set_up_says(node)
    cgroups = {**BAD, "subject": "kubelet's cgroups", "check": "kubelet_cgroups"}
    (node.root / "check").write_text(json.dumps([cgroups]))
    (node.root / "repaired").write_text("[]")
    assert put_on(node) == []
    assert RESTART in asked(node)


def test_the_next_run_restarts_kubelet_if_a_run_breaks_off_before(node: Node) -> None:
    breaks = node.root / "breaks"
    set_up_says(node)
    for command in (f"{CHECK} --json", RESTART):
        breaks.write_text(command)
        with pytest.raises(Trouble, match="ended with 9"):
            put_on(node)
        breaks.unlink()
        set_up_says(node, "same")
    assert RESTART not in asked(node)
    assert put_on(node) == []
    assert RESTART in asked(node)
    set_up_says(node, "remove")
    breaks.write_text(RESTART)
    with pytest.raises(Trouble, match="ended with 9"):
        on_node.uninstall(node)
    breaks.unlink()
    set_up_says(node, "same")
    on_node.uninstall(node)
    assert asked(node).count(RESTART) == 1


def test_an_operator_who_restarts_kubelet_is_reminded_until_done(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node gets no label: its kubelet does not know the RuntimeClass yet."""
    set_up_says(node)
    started = node.root / "started"
    started.write_text("Mon 10:00")
    theirs = Node(node.root, node.payload, node.enter, restarts_kubelet=False)
    for _ in range(2):
        (told,) = put_on(theirs)
        assert "systemctl restart kubelet (RESTART_KUBELET is false)" in told
    started.write_text("Mon 11:00")
    set_up_says(node, "same")
    assert put_on(theirs) == []
    set_up_says(node, "remove")
    capsys.readouterr()
    on_node.uninstall(theirs)
    assert "systemctl restart kubelet (RESTART_KUBELET is false)" in capsys.readouterr().out
    assert RESTART not in asked(node)


def test_a_kubelet_that_was_restarted_with_the_node_is_not_restarted_again(node: Node) -> None:
    set_up_says(node)
    (node.root / "started").write_text("Mon 10:00")
    (node.root / "check").write_text(json.dumps([BAD]))
    assert put_on(node)
    set_up_says(node, "same")
    (node.root / "started").write_text("Mon 11:00")
    (node.root / "check").write_text("[]")
    assert put_on(node) == []
    assert RESTART not in asked(node)


def test_units_that_the_operator_enabled_are_stopped_before_their_files_go(node: Node) -> None:
    set_up_says(node)
    put_on(node)
    asked(node)
    on_node.uninstall(node)
    told = asked(node)
    assert f"systemctl disable --now {' '.join(UNITS)}" in told


def test_output_of_check_that_is_not_json_is_reported(node: Node) -> None:
    broken = Node(node.root, node.payload, (sys.executable, "-c", "print('Traceback')"))
    with pytest.raises(Trouble, match=r"virtshim check --json on the node did not answer JSON .*: 'Traceback"):
        on_node.asked(broken, "check", "--json")


def test_a_pod_that_is_not_of_the_daemonset_gets_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_node.main(["run"], {}) == 1
    assert "'NODE_NAME' is not set: `run` is for a pod of the DaemonSet" in capsys.readouterr().out


@needs_root
def test_removal_at_the_end_removes_the_label_first(node: Node, cluster: Cluster) -> None:
    put_on(node)
    on_node.stay(node, cluster, STOPPED, then_uninstall=True)
    assert LABELS == ["true", None]
    assert not (node.root / "usr/lib/virtshim").exists()


@needs_root
def test_removal_works_if_the_cluster_does_not_answer(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    put_on(node)
    STOPPED.set()
    on_node.stay(node, Api("node-1", "127.0.0.1", 1, Path("/nowhere")), STOPPED, then_uninstall=True)
    assert "the label of node node-1 is not set" in capsys.readouterr().out
    assert not (node.root / "usr/lib/virtshim").exists()


def test_a_failing_program_of_the_node_is_reported_with_its_output(node: Node) -> None:
    failing = Node(node.root, node.payload, (sys.executable, "-c", "import sys; sys.exit('no bus')"))
    with pytest.raises(Trouble, match="systemctl start x on the node ended with 1: no bus"):
        failing.run("systemctl", "start", "x")


@pytest.fixture
def apiserver(tmp_path: Path) -> Iterator[tuple[int, list[tuple[str, str, Any]]]]:
    """An API server over TLS, with the service account's files; answers 200 for node-1."""
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-keyout", f"{tmp_path}/key", "-out", f"{tmp_path}/ca.crt", "-subj", "/CN=api",
            "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    (tmp_path / "token").write_text("secret\n")
    calls: list[tuple[str, str, Any]] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            calls.append((self.path, self.headers["Authorization"], json.loads(body)))
            self.send_response(200 if self.path.endswith("/node-1") else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Logs nothing to standard error."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{tmp_path}/ca.crt", f"{tmp_path}/key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], calls
        server.shutdown()
        thread.join()


def test_the_label_is_patched_with_the_pods_service_account(apiserver: tuple[int, list[Any]], tmp_path: Path) -> None:
    port, calls = apiserver
    Api("node-1", "127.0.0.1", port, tmp_path).label("true")
    Api("node-1", "127.0.0.1", port, tmp_path).label(None)
    path, bearer = "/api/v1/nodes/node-1", "Bearer secret"
    assert calls == [(path, bearer, {"metadata": {"labels": {LABEL: value}}}) for value in ("true", None)]
    with pytest.raises(Trouble, match="node node-2 is not set: 404"):
        Api("node-2", "127.0.0.1", port, tmp_path).label("true")
    with pytest.raises(Trouble, match="not set"):
        Api("node-1", "127.0.0.1", 1, tmp_path).label("true")


@needs_root
def test_the_image_has_the_base_the_packages_files_and_the_program(
    tmp_path: Path, payload: Path, pytestconfig: pytest.Config
) -> None:
    """The package and the base are small; the steps are real, by buildah."""
    for tool in ("buildah", "mmdebstrap", "dpkg-deb"):
        if shutil.which(tool) is None:
            pytest.skip(f"NOT TESTED: {tool} is not installed")
    (payload / ".version").unlink()
    (payload / "DEBIAN").mkdir()
    control = "Package: virtshim\nVersion: 9.9~deb12\nArchitecture: amd64\nMaintainer: x <x@x>\nDescription: x\n"
    (payload / "DEBIAN/control").write_text(control)
    subprocess.run(["dpkg-deb", "--build", payload, tmp_path / "v.deb"], check=True, capture_output=True, timeout=60)
    (tmp_path / "base/usr/bin").mkdir(parents=True)
    (tmp_path / "base/usr/bin/python3").write_text("python")
    with tarfile.open(tmp_path / "base.tar", "w") as tar:
        tar.add(tmp_path / "base", arcname=".")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [pytestconfig.rootpath / "deploy/image/build.sh", tmp_path / "v.deb", tmp_path / "out/image.tar"],
        env={**os.environ, "IMAGE_BASE": str(tmp_path / "base.tar"), "TMPDIR": str(scratch)},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "virtshim:9.9" in done.stdout
    assert os.listdir(scratch) == []

    config, files = unpacked(tmp_path / "out/image.tar", tmp_path / "image")
    assert config["config"]["Entrypoint"] == ["/usr/bin/python3", "-I", "/usr/local/bin/on_node.py"]
    assert config["config"]["Cmd"] == ["run"]
    assert config["config"]["Labels"]["org.opencontainers.image.version"] == "9.9"
    source = (pytestconfig.rootpath / "deploy/image/on_node.py").read_bytes()
    assert (files / "usr/local/bin/on_node.py").read_bytes() == source
    assert (files / "payload/.version").read_text().startswith("9.9~deb12 ")
    assert (files / "payload/usr/lib/virtshim/bin/python3").is_symlink()
    assert (files / "usr/bin/python3").read_text() == "python"
    assert {path.name for path in files.iterdir()} == {"payload", "usr"}


def unpacked(archive: Path, place: Path) -> tuple[dict[str, Any], Path]:
    """An OCI archive's configuration, and its layers laid over each other."""
    extract(archive, place / "oci")
    blob = lambda one: place / "oci/blobs" / one["digest"].replace(":", "/")  # noqa: E731
    (image,) = json.loads((place / "oci/index.json").read_text())["manifests"]
    manifest = json.loads(blob(image).read_text())
    for layer in manifest["layers"]:
        extract(blob(layer), place / "files")
    return json.loads(blob(manifest["config"]).read_text()), place / "files"


def extract(archive: Path, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", place], check=True, timeout=60)


def test_the_image_runs_the_programs_of_the_cluster_itself(tmp_path: Path) -> None:
    package = tmp_path / "usr/lib/virtshim/lib/python3.99/site-packages/virtshim/cli"
    package.mkdir(parents=True)
    for directory in (package.parent, package):
        (directory / "__init__.py").touch()
    (package / "main.py").write_text("import sys\n\ndef main():\n    print(sys.argv[1:])\n    return 7\n")
    done = subprocess.run(
        on_node.command_here(["controller", "--moves", "3"], str(tmp_path)), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (7, "['controller', '--moves', '3']")
