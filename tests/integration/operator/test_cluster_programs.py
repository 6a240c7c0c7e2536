"""`virtshim controller` and `virtshim agent` start, serve, and end at SIGTERM. The error of a wrong option has a
remedy."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.cluster_parts import ClusterParts
from fakes.kubernetes_api import KubernetesApi

from virtshim.peers.certificates import PeerFiles, read_certificate

pytestmark = pytest.mark.operator


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesApi]:
    made = KubernetesApi(tmp_path)
    ClusterParts(made)
    yield made
    made.close()


# The setting images.translations_dir.
TRANSLATIONS = "VIRTSHIM_IMAGES__TRANSLATIONS_DIR"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "virtshim", *words]


@pytest.mark.parametrize(
    ("words", "serving"),
    [
        (("controller", "--listen", "127.0.0.1:0"), "controller.serving"),
        (("agent", "--node", "n1", "--socket", "/nowhere/virtshim.sock"), "agent.serving"),
    ],
    ids=["controller", "agent"],
)
def test_a_program_serves_until_it_is_told_to_stop(api: KubernetesApi, words: tuple[str, ...], serving: str) -> None:
    argv = command(*words, "--kubeconfig", api.kubeconfig())
    environment = os.environ | {"NO_COLOR": "1", TRANSLATIONS: str(api.place / "images")}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stderr is not None
        said, end = "", time.monotonic() + 60
        while serving not in said:
            line = program.stderr.readline()
            assert line, f"it has ended: {said}"
            assert time.monotonic() < end
            said += line
        program.send_signal(signal.SIGTERM)
        rest = program.communicate(timeout=30)[1]
        assert program.returncode == 0, said + rest


def test_an_agent_has_its_nodes_name_from_its_token_mirrors_by_the_settings_and_tells_systemd(
    api: KubernetesApi, tmp_path: Path
) -> None:
    spec = {"translations": [{"name": "tiny", "url": "images.example/tiny.img"}]}
    api.put("virtletimagemappings", {"metadata": {"namespace": "kube-system", "name": "tiny"}, "spec": spec})
    claims = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": {"node": {"name": "n2"}}}).encode()).decode()
    token = f"e30.{claims.rstrip('=')}.c2ln"
    api.tokens[token] = "admin"
    argv = command("agent", "--socket", "/nowhere/virtshim.sock", "--kubeconfig", api.kubeconfig(token))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        own = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "NODE_NAME": "", TRANSLATIONS: str(tmp_path / "images")}
        environment = os.environ | own
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL, env=environment) as program:
            told = [systemd.recv(1000).decode() for _ in range(2)]
            while not (tmp_path / "images/tiny.yaml").exists():
                told.append(systemd.recv(1000).decode())
            program.send_signal(signal.SIGTERM)
            told += iter(lambda: systemd.recv(1000).decode(), "STOPPING=1")
            assert program.wait(30) == 0
    assert told[0].startswith("READY=1\nSTATUS=")
    assert told[0].endswith("node n2")
    assert set(told[1:]) == {"WATCHDOG=1"}


def test_a_signing_controller_and_an_agent_give_the_node_a_certificate(api: KubernetesApi, tmp_path: Path) -> None:
    """As programs; the API server knows the agent's node by its token."""
    api.tokens["agent"] = "system:serviceaccount:virtshim-cluster:virtshim-agent"
    api.extra["agent"] = {"authentication.kubernetes.io/node-name": ["n1"]}
    place = tmp_path / "peers"
    programs = [
        command("controller", "--listen", "", "--sign-certificates", "--kubeconfig", api.kubeconfig()),
        command("agent", "--node", "n1", "--certificates", str(place), "--kubeconfig", api.kubeconfig("agent")),
    ]
    with contextlib.ExitStack() as stack:
        for argv in programs:
            program = stack.enter_context(subprocess.Popen(argv, stderr=subprocess.DEVNULL))
            stack.callback(program.send_signal, signal.SIGTERM)
        end = time.monotonic() + 60
        while not (place / "node.pem").exists():
            assert time.monotonic() < end
            with api.news:
                api.news.wait(0.2)
    files = PeerFiles(*[str(place / "node.pem")] * 3)
    assert read_certificate(files).node == "n1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("controller",), "name a kubeconfig"),
        (("controller", "--kubeconfig", "/nowhere"), "cannot be read"),
        (("controller", "--moves", "0", "--kubeconfig", "/nowhere"), "must be at least 1"),
        (("agent",), "--node: write the node's name"),
        (("agent", "--kubeconfig", "/nowhere"), "cannot be read"),
        (("agent", "--node", "n1", "--certificates", "peers"), "--certificates: must be an absolute path"),
    ],
)
def test_a_wrong_start_has_a_remedy(words: tuple[str, ...], told: str) -> None:
    hidden = {name: value for name, value in os.environ.items() if not name.startswith(("KUBERNETES_", "NODE_NAME"))}
    done = subprocess.run(command(*words), capture_output=True, text=True, check=False, timeout=60, env=hidden)
    assert done.returncode == 78
    assert told in done.stderr
