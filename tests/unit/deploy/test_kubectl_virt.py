"""The kubectl plugin works with a fake kubectl that records its calls."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.kubectl import FakeKubectl

pytestmark = pytest.mark.operator

LIMIT = 60.0


def pod(name: str = "web", phase: str = "Running", **container: Any) -> dict[str, Any]:
    annotations = container.pop("annotations", {})
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}", "annotations": annotations},
        "spec": {
            "nodeName": "node-1",
            "runtimeClassName": "virtshim",
            "containers": [
                {"name": "vm", "stdin": True, "resources": {"limits": {"cpu": "2", "memory": "2Gi"}}, **container}
            ],
        },
        "status": {"phase": phase},
    }


def says(value: object) -> dict[str, str]:
    return {"out": json.dumps(value)}


@pytest.fixture
def kubectl(tmp_path: Path) -> FakeKubectl:
    return FakeKubectl(tmp_path / "bin")


@pytest.fixture(scope="session")
def plugin(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.rootpath / "deploy/kubectl-virt/kubectl-virt")


@pytest.fixture
def run(kubectl: FakeKubectl, plugin: str) -> Any:
    def ran(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, plugin, *words], env=kubectl.environment, input=stdin, capture_output=True, text=True,
            timeout=LIMIT, check=False,
        )  # fmt: skip

    return ran


class Terminal:
    """The plugin in a terminal of 100 columns and 30 lines."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.ours, self.its = pty.openpty()
        fcntl.ioctl(self.its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.modes = termios.tcgetattr(self.its)
        self.seen = b""
        self.process = subprocess.Popen(command, stdin=self.its, stdout=self.its, stderr=self.its, env=environment)

    def types(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def sees(self, text: bytes) -> None:
        until = time.monotonic() + LIMIT
        while text not in self.seen:
            assert select.select([self.ours], [], [], max(0.0, until - time.monotonic()))[0], self.seen
            self.seen += os.read(self.ours, 4096)

    def ends(self) -> int:
        return self.process.wait(LIMIT)


@pytest.fixture
def terminal(kubectl: FakeKubectl, plugin: str) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def opened(*words: str) -> Terminal:
            made = Terminal([sys.executable, plugin, *words], kubectl.environment)
            stack.callback(os.close, made.ours)
            stack.callback(os.close, made.its)
            stack.callback(made.process.wait)
            stack.callback(made.process.kill)
            return made

        yield opened


# --- console


def test_the_console_gets_every_key_and_ctrl_bracket_leaves(kubectl: FakeKubectl, terminal: Any) -> None:
    kubectl.plan(get_pod=says(pod(tty=True)), attach={"does": "terminal"})
    opened = terminal("console", "web", "-n", "team", "--context", "prod")
    opened.sees(b"size 100x30\r\nlogin: ")
    opened.types(b"\x03\x1a\r")  # ctrl-c, ctrl-z, return
    opened.sees(b"0d>")
    assert b"<031a0d>" in opened.seen.replace(b"><", b"")
    opened.types(b"\x1d")
    assert opened.ends() == 0
    opened.sees(b"detached; the virtual machine keeps running")
    assert termios.tcgetattr(opened.its) == opened.modes, "the terminal is as it was"
    where = ["--context", "prod", "--namespace", "team"]
    assert kubectl.calls == [
        [*where, "get", "pod", "web", "-o", "json"],
        [*where, "attach", "pod/web", "-c", "vm", "-q", "-i", "-t"],
    ]


def test_the_console_ends_with_kubectl_and_its_exit_code(kubectl: FakeKubectl, terminal: Any) -> None:
    kubectl.plan(get_pod=says(pod()), attach={"does": "terminal", "code": 3})
    opened = terminal("console", "web")
    opened.sees(b"login: ")
    opened.types(b"\x04")
    assert opened.ends() == 3
    assert termios.tcgetattr(opened.its) == opened.modes
    assert "-t" not in kubectl.calls[-1], "the container has no terminal; the keys come raw all the same"


def test_a_console_that_takes_no_input_says_so(kubectl: FakeKubectl, run: Any) -> None:
    kubectl.plan(get_pod=says(pod(stdin=False)), attach={"out": "boot messages\n"})
    done = run("console", "web")
    assert (done.returncode, done.stdout) == (0, "boot messages\n")
    assert "set stdin: true" in done.stderr
    assert "-i" not in kubectl.calls[-1]


def test_console_input_that_is_no_terminal_is_passed_on_unchanged(kubectl: FakeKubectl, run: Any) -> None:
    kubectl.plan(get_pod=says(pod()), attach={"does": "terminal"})
    assert run("console", "web", stdin="hi").stdout == f"login: <{b'hi'.hex()}>"


# --- ssh


def test_ssh_goes_through_port_forward_with_its_own_options(kubectl: FakeKubectl, run: Any) -> None:
    kubectl.plan(get_pod=says(pod()), **{"port-forward": {"does": "ports"}})
    # Stands for ssh: its arguments, and what its ProxyCommand brings.
    kubectl.program(
        "ssh",
        'printf "%s\\n" "$@"; for one; do case $one in ProxyCommand=*) echo hello | sh -c "${one#*=}";; esac; done',
    )
    done = run("ssh", "debian@web", "-i", "key", "-n", "default", "--", "-L", "8080:localhost:80", "uptime")
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[-2:] == ["port 22", "HELLO"]
    assert "HostKeyAlias=web.default.uid-of-web" in words
    given = words[words.index("-l") : -2]
    assert given == ["-l", "debian", "-i", "key", "web.default", "-L", "8080:localhost:80", "uptime"]
    assert kubectl.calls[-1] == ["--namespace", "default", "port-forward", "--address", "127.0.0.1", "pod/web", ":22"]


def test_the_forward_ends_when_either_side_ends_the_proxy_command(kubectl: FakeKubectl, plugin: str) -> None:
    kubectl.plan(**{"port-forward": {"does": "ports"}})
    with subprocess.Popen(
        [sys.executable, plugin, "stdio", "web", "22"],
        env=kubectl.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"port 22\n"
        assert kubectl.forwards
        process.send_signal(signal.SIGHUP)
        assert process.wait(LIMIT) == 128 + signal.SIGHUP
    assert not kubectl.forwards


def test_a_failed_port_forward_is_reported_in_kubectls_words(kubectl: FakeKubectl, run: Any) -> None:
    kubectl.plan(**{"port-forward": {"err": "error: pods/portforward is forbidden\n", "code": 1}})
    done = run("stdio", "web", "22")
    assert done.returncode == 1
    assert "pods/portforward is forbidden" in done.stderr


def test_a_broken_connection_is_reported_in_one_line(kubectl: FakeKubectl, run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    kubectl.plan(**{"port-forward": {"out": f"Forwarding from 127.0.0.1:{closed} -> 22\n"}})
    done = run("stdio", "web", "22")
    assert (done.returncode, done.stderr) == (
        1, "kubectl virt: the connection to port 22 of pod web broke: Connection refused\n",
    )  # fmt: skip


# --- vnc


def test_the_screen_is_on_a_port_of_this_machine_until_ctrl_c(kubectl: FakeKubectl, plugin: str) -> None:
    kubectl.plan(get_pod=says(pod(annotations={"virtshim.io/vnc": "true"})), **{"port-forward": {"does": "ports"}})
    with subprocess.Popen(
        [sys.executable, plugin, "vnc", "web"], env=kubectl.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        where = process.stdout.readline().decode().strip()
        host, _, port = where.partition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=LIMIT) as viewer:
            assert viewer.recv(100) == b"port 5900\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=LIMIT)


def test_a_viewer_gets_the_port_and_the_command_ends_with_the_viewer(kubectl: FakeKubectl, run: Any) -> None:
    kubectl.plan(get_pod=says(pod(annotations={"virtshim.io/vnc": "true"})), **{"port-forward": {"does": "ports"}})
    kubectl.program("show", 'echo "shows $1"; exit 5')
    done = run("vnc", "web", "--viewer", "show vnc://127.0.0.1:{port}")
    where, shown = done.stdout.splitlines()
    assert (done.returncode, shown) == (5, f"shows vnc://{where}")


@pytest.mark.parametrize(("viewer", "code"), [("no-such-viewer", 127), ("show 'half", 1)])
def test_a_viewer_that_cannot_be_started_is_named(viewer: str, code: int, kubectl: FakeKubectl, run: Any) -> None:
    kubectl.plan(get_pod=says(pod(annotations={"virtshim.io/vnc": "true"})), **{"port-forward": {"does": "ports"}})
    done = run("vnc", "web", "--viewer", viewer)
    assert done.returncode == code
    assert f"kubectl virt: --viewer {viewer}: " in done.stderr


def test_a_pod_without_a_screen_is_refused_with_the_annotation(kubectl: FakeKubectl, run: Any) -> None:
    kubectl.plan(get_pod=says(pod()))
    done = run("vnc", "web")
    assert done.returncode == 1
    assert 'virtshim.io/vnc: "true"' in done.stderr
    assert len(kubectl.calls) == 1


# --- top

METRICS = {
    "items": [
        {
            "metadata": {"name": "web", "namespace": "default"},
            "containers": [{"name": "vm", "usage": {"cpu": "1250123456n", "memory": "524288Ki"}}],
        }
    ]
}
SUMMARY = {
    "pods": [
        {
            "podRef": {"name": "web", "namespace": "default"},
            "containers": [{"cpu": {"usageNanoCores": 250_000_000}, "memory": {"workingSetBytes": 256 << 20}}],
        }
    ]
}


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_top_shows_what_the_metrics_api_says(kubectl: FakeKubectl, run: Any) -> None:
    others = {**pod("other"), "spec": {**pod()["spec"], "runtimeClassName": None}}
    kubectl.rules(
        ("get pods", says({"items": [pod(), pod("new"), pod("done", "Succeeded"), others]})),
        ("metrics.k8s.io/v1beta1/namespaces/default/pods", says(METRICS)),
    )
    assert cells(run("top").stdout) == [
        ["NAMESPACE", "POD", "NODE", "CPU", "LIMIT", "MEMORY", "LIMIT"],
        ["default", "web", "node-1", "1250m", "2", "512Mi", "2Gi"],
        ["default", "new", "node-1", "-", "2", "-", "2Gi"],
    ]


def test_without_a_metrics_server_kubelet_is_asked(kubectl: FakeKubectl, run: Any) -> None:
    kubectl.rules(
        ("get pod web", says(pod())),
        ("metrics.k8s.io", {"err": "the server could not find the requested resource\n", "code": 1}),
        ("/api/v1/nodes/node-1/proxy/stats/summary", says(SUMMARY)),
    )
    assert cells(run("top", "web").stdout)[1][3:6] == ["250m", "2", "256Mi"]


def test_without_metrics_server_and_kubelet_both_remedies_are_named(kubectl: FakeKubectl, run: Any) -> None:
    kubectl.rules(
        ("get pod web", says(pod())), ("--raw", {"err": "Error from server (Forbidden): nodes/proxy\n", "code": 1})
    )
    done = run("top", "web")
    assert done.returncode == 1
    for words in ("Forbidden", "install metrics-server", "nodes/proxy"):
        assert words in done.stderr


# --- mistakes


@pytest.mark.parametrize(
    ("answer", "words", "code"),
    [
        ({"err": 'Error from server (NotFound): pods "web" not found\n', "code": 1}, 'pods "web" not found', 1),
        (says(pod(phase="Pending")), "pod web is Pending, so it has no running virtual machine", 1),
        (says(pod()), "has no container x; it has vm", 1),
    ],
)
def test_a_pods_problem_is_reported(
    kubectl: FakeKubectl, run: Any, answer: dict[str, Any], words: str, code: int
) -> None:
    kubectl.plan(get_pod=answer)
    done = run("console", "web", "-c", "x")
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(
    ("annotations", "is_told"),
    [({}, False), ({"virtshim.io/on-stop": "save"}, True), ({"virtshim.io/state-volume": "/state"}, True)],
)
def test_a_restart_says_that_a_virtual_machine_whose_stop_saves_continues(
    kubectl: FakeKubectl, run: Any, annotations: dict[str, str], is_told: bool
) -> None:
    vm = {"metadata": {"name": "db"}, "spec": {"template": {"metadata": {"annotations": annotations}}}}
    kubectl.plan(get_virtualmachine_db=says(vm), patch_virtualmachine_db=says(vm))
    told = run("restart", "db", "--timeout", "0").stderr
    assert ("reboot the guest from inside" in told) is is_told
    assert any("restartedAt" in " ".join(words) for words in kubectl.calls)


def test_without_kubectl_the_error_says_where_to_get_it(plugin: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, plugin, "top"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, "no kubectl in PATH" in done.stderr) == (127, True)


# --- its file


def test_the_plugin_needs_only_the_standard_library_of_an_old_python(plugin: str) -> None:
    import ast

    tree = ast.parse(Path(plugin).read_text(), feature_version=(3, 8))
    names = {name.name.split(".")[0] for one in ast.walk(tree) if isinstance(one, ast.Import) for name in one.names}
    names |= {(one.module or "").split(".")[0] for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    assert names <= set(sys.stdlib_module_names)
    assert os.access(plugin, os.X_OK)


def test_the_krew_manifest_names_the_file_and_the_version(pytestconfig: pytest.Config) -> None:
    root = pytestconfig.rootpath
    manifest = yaml.safe_load((root / "deploy/kubectl-virt/krew.yaml").read_text())
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert (manifest["kind"], manifest["metadata"]["name"], manifest["spec"]["version"]) == (
        "Plugin",
        "virt",
        f"v{version}",
    )
    (platform,) = manifest["spec"]["platforms"]
    assert platform["bin"] == "kubectl-virt"
    for file in platform["files"]:
        assert any((directory / file["from"]).is_file() for directory in (root, root / "deploy/kubectl-virt"))
