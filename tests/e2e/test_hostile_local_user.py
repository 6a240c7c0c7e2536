"""An unprivileged user of the machine gets nothing from a running node and disturbs nothing."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import stat
import subprocess
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import stranger
from fakes.spdy import close_all, spdy
from node import VIRTSHIM, Node
from podclient import PodClient, container_config, pod_config
from running_vm import RunningVm

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.hostile]

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs")
PASSWORD = "correct-horse-battery"
ATTEMPTS = [
    name
    for name, function in inspect.getmembers(stranger, inspect.isfunction)
    if not name.startswith("_") and name != "main" and function.__module__ == stranger.__name__
]
DISTURBING = ["asks_tapmanager_without_end", "holds_all_connections_to_the_streaming_server"]


@dataclass
class Attacked:
    """A node with a running VM."""

    node: Node
    cri: PodClient
    pod: str
    container: str
    facts: dict[str, Any] = field(default_factory=dict)

    def is_undisturbed(self, daemons: dict[str, int]) -> bool:
        running = self.cri.status(self.container).state == pb.CONTAINER_RUNNING
        return running and self.node.daemons() == daemons and self.facts["qemu"] in self.node.qemu_pids()

    def forwarding_url(self) -> str:
        return self.cri.runtime.PortForward(pb.PortForwardRequest(pod_sandbox_id=self.pod)).url

    def shows_its_screen(self) -> str:
        """Shows the VM's screen; returns the token."""
        url = self.forwarding_url()
        client = spdy(url, "portforward.k8s.io")
        client.open(streamtype="error", fin=True, port="5900", requestid="0")
        data = client.open(streamtype="data", port="5900", requestid="0")
        client.until(lambda: bytes(client.received[data]) == b"RFB 003.008\n")
        close_all()
        return token_of(url)


def token_of(url: str) -> str:
    return urllib.parse.urlsplit(url).path.rpartition("/")[2]


@pytest.fixture(scope="module")
def attacked(node: Node, running_vm: RunningVm, image_url: str) -> Iterator[Attacked]:
    running_vm.end()
    annotations = {"virtshim.io/vnc": "true", "VirtletCloudInitUserData": f"password: {PASSWORD}\n"}
    config = pod_config("attacked", f"{node.directory}/logs/attacked", annotations=annotations)
    with PodClient(node.socket) as cri:
        pod = cri.run_pod(config)
        container = cri.create(pod, container_config(cri.pull(f"{image_url}/null.qcow2")), config)
        cri.start(container)
        made = Attacked(node, cri, pod, container)
        made.facts = facts_of(made)
        # All targets exist; an attempt on a missing one would prove nothing.
        for name in (
            "ledger",
            "definitions",
            "master_keys",
            "conflists",
            "locks",
            "monitors",
            "all_sockets",
            "cgroups",
        ):
            assert made.facts[name], name
        for name in ("log", "image", "screen", "netns"):
            assert os.path.exists(made.facts[name]), name
        yield made
        for one in cri.pods():
            cri.remove_pod(one.id)


def facts_of(it: Attacked) -> dict[str, Any]:
    top = Path(it.node.directory)
    every = list(top.rglob("*"))
    sockets = [str(path) for path in every if stat.S_ISSOCK(path.lstat().st_mode)]
    daemons = it.node.daemons()
    (qemu,) = [
        pid for pid in it.node.qemu_pids() if it.container[:12].encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    url = it.forwarding_url()
    ledger = [str(path) for path in (top / "state/tapmanager").rglob("*") if path.is_file() and path.suffix == ".json"]
    key = re.search(r'"fetch_key": ?"([^"]+)"', "".join(Path(path).read_text() for path in ledger))
    assert key
    status = it.cri.status(it.container)
    groups = Path(f"/proc/{qemu}/cgroup").read_text().splitlines()
    return {
        "directory": str(top), "state": f"{top}/state", "run": f"{top}/run",
        "directories": [str(top), *(str(path) for path in every if path.is_dir())],
        "container_dir": f"{top}/state/containers/{it.container}",
        "sockets": f"{top}/run/vm/{it.container[:20]}",
        "screen": f"{top}/run/vnc/{it.container[:20]}/vnc.sock",
        "log": status.log_path,
        "image": f"{top}/state/images/sha256/{status.image_ref.rpartition(':')[2]}",
        "ledger": ledger,
        "definitions": [str(path) for path in (top / "libvirt").rglob("*.xml") if "capabilities" not in str(path)],
        "master_keys": [str(path) for path in (top / "libvirt").rglob("master-key.aes")],
        "libvirt_logs": [str(path) for path in (top / "libvirt/log").rglob("*.log")],
        "monitors": [path for path in sockets if path.endswith("monitor.sock")],
        "all_sockets": sockets,
        "conflists": [str(path) for path in top.rglob("*.conflist")],
        "locks": [str(path) for path in every if path.name.endswith((".lock", "/lock")) or path.name == "lock"],
        "cgroups": [
            path for path in (
            f"/sys/fs/cgroup/{line.split(':')[1]}{line.split(':')[2]}/cgroup.procs".replace("//", "/") for line in groups
            ) if os.path.exists(path)
        ],
        "pids": [*daemons.values(), qemu],
        "qemu": qemu,
        "netns": f"/run/netns/virtshim-{it.pod[:20]}",
        "stream_port": urllib.parse.urlsplit(url).port,
        "token": token_of(url),
        "used_token": it.shows_its_screen(),
        "secrets": [key[1], PASSWORD, token_of(url)],
    }  # fmt: skip


@contextlib.contextmanager
def trying(it: Attacked, attempt: str) -> Iterator[subprocess.Popen[str]]:
    command = (*AS_NOBODY, "/usr/bin/python3", "-IS", "-c", inspect.getsource(stranger), attempt)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stdin is not None
        print(json.dumps(it.facts), file=process.stdin, flush=True)
        try:
            yield process
        finally:
            process.kill()


def tried(it: Attacked, attempt: str) -> dict[str, str]:
    with trying(it, attempt) as process:
        said, _ = process.communicate(timeout=60)
    result: dict[str, str] = json.loads(said.splitlines()[-1])
    return result


@pytest.mark.parametrize("attempt", [name for name in ATTEMPTS if name not in DISTURBING])
def test_an_attempt_of_a_stranger_fails(attacked: Attacked, attempt: str) -> None:
    daemons = attacked.node.daemons()
    result = tried(attacked, attempt)
    assert not result.get("got"), result
    if attempt != "talks_to_the_machines_libvirt":  # there may be none
        assert "No such file" not in result.get("refused", ""), "it looked in the wrong place"
    assert attacked.is_undisturbed(daemons)


@pytest.mark.parametrize("attempt", DISTURBING)
def test_the_node_serves_others_during_an_attempt_of_a_stranger(attacked: Attacked, attempt: str) -> None:
    with trying(attacked, attempt) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
        attacked.shows_its_screen()
        pod = attacked.cri.run_pod(pod_config("beside", f"{attacked.node.directory}/logs"))
        attacked.cri.remove_pod(pod)


def test_the_attempts_of_a_stranger_succeed_for_root(attacked: Attacked) -> None:
    """Shows that a stranger's failure is due to missing rights."""
    reading = [name for name in ATTEMPTS if name.startswith(("reads_", "lists_", "sees_"))]
    talking = [
        "talks_to_the_cri_and_admin_socket",
        "talks_to_tapmanager",
        "looks_at_the_screen_of_a_vm",
        "talks_to_the_guest_agent",
    ]
    for attempt in (*reading, *talking):
        command = ("/usr/bin/python3", "-IS", "-c", inspect.getsource(stranger), attempt)
        done = subprocess.run(
            command, input=json.dumps(attacked.facts), capture_output=True, text=True, check=True, cwd="/"
        )
        assert json.loads(done.stdout).get("got"), f"{attempt}: {done.stdout}"


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_stranger_cannot_control_a_node(attacked: Attacked, command: str) -> None:
    daemons = attacked.node.daemons()
    source = os.environ.get("PYTHONPATH", os.getcwd())
    argv = (*AS_NOBODY, VIRTSHIM[0], "-m", "virtshim", command, "--dir", attacked.node.directory)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": source})
    assert done.returncode != 0
    assert attacked.is_undisturbed(daemons)


def test_up_refuses_a_directory_that_a_stranger_prepared(attacked: Attacked, node_root: str) -> None:
    place = Path(node_root, "strangers")
    place.mkdir()
    try:
        os.chown(place, NOBODY, NOBODY)
        prepare = "mkdir config.toml.d run; touch config.toml.d/1.toml run/up.lock; ln -s /etc/passwd config.toml.new"
        subprocess.run((*AS_NOBODY, "sh", "-c", prepare), cwd=place, check=True)
        before = Path("/etc/passwd").read_bytes()
        for words in (("up",), ("down", "--all")):
            done = subprocess.run(
                [*VIRTSHIM, words[0], "--dir", str(place), *words[1:]], capture_output=True, text=True, check=False
            )
            assert done.returncode != 0
            assert f"belongs to user {NOBODY}" in done.stderr
        assert Path("/etc/passwd").read_bytes() == before
        assert sorted(os.listdir(place)) == ["config.toml.d", "config.toml.new", "run"]
    finally:
        shutil.rmtree(place)
