"""`virtshim diag` on a node with a VM collects what a diagnosis needs, and no secret."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from node import VIRTSHIM, Node
from podclient import PodClient, container_config, pod_config

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.operator]

KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{('Planted' * 7)[:43]} someone@planted"
ANNOTATIONS = {
    "VirtletSSHKeys": KEY,
    "VirtletCloudInitUserData": "chpasswd: {expire: false}\nwrite_files: [{content: Planted-file-7, path: /x}]\n",
    "VirtletCloudInitMetaData": "hint: Planted-meta-7\n",
    "example.com/vault": "Planted-annotation-7",
    "virtshim.io/vnc": "true",
}


def taken(node: Node, directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Takes an archive; returns the summary and the files."""
    command = [*VIRTSHIM, "diag", str(directory), "--dir", node.directory, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert [str(path) for path in directory.iterdir()] == [summary["archive"]]
    assert Path(summary["archive"]).stat().st_mode & 0o777 == 0o600
    with tarfile.open(summary["archive"]) as archive:
        files = {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    Path(summary["archive"]).unlink()
    return summary, files


def test_an_archive_has_what_is_needed_and_no_secret(
    cri: PodClient, node: Node, image_url: str, null_image: Path, tmp_path: Path
) -> None:
    config = pod_config("looked-at", f"{node.directory}/logs/looked-at", ANNOTATIONS)
    pod = cri.run_pod(config)
    login = pb.AuthConfig(username="me", password="Planted-registry-7")
    wanted = container_config(cri.pull(f"{image_url}/{null_image.name}", login))
    wanted.envs.add(key="DATABASE_URL", value=b"Planted-variable-7")
    wanted.command.extend(["sh", "-c", "sleep 600", "--license", "Planted-argument-7"])
    vm = cri.create(pod, wanted, config)
    cri.start(vm)
    conf = Path(node.directory, "cni/net.d/99-other.conf")
    conf.write_text(json.dumps({"name": "other", "type": "bridge", "service_token": "Planted-cni-7"}))
    kubeconfig = Path(node.directory, "cni/net.d/kubeconfig")
    kubeconfig.write_text("users: [{user: {client-key-data: Planted-kubeconfig-7}}]")
    with Path(node.directory, "log/virtshim.log").open("a") as log:
        log.write("tried Authorization: Bearer Planted-bearer-7 and what the pod has, Planted-variable-7\n")

    command = ["qemu-system-x86_64", "-c", "import time; time.sleep(600)", "-append", "Planted-foreign-7"]
    foreign = subprocess.Popen(command, executable=sys.executable)
    before = node.daemons()
    try:
        summary, files = taken(node, tmp_path)
    finally:
        foreign.kill()
        foreign.wait()
    assert node.daemons() == before, "no daemon was harmed"
    assert {name: part["trouble"] for name, part in summary["parts"].items() if part["trouble"]} == {}
    assert [path for path, text in files.items() if "planted" in text.lower()] == []
    assert "AAAAC3NzaC1lZDI1NTE5" not in "".join(files.values())

    (domain,) = [path.split("/")[1] for path in files if path.endswith("/status.xml")]
    assert f"{domain:<40} running" in files["domains/states.txt"]
    assert "<graphics" in files[f"domains/{domain}/definition.xml"]
    assert '"looked-at"' in files["store/sandboxes.jsonl"]
    assert '"DATABASE_URL"' in files["store/containers.jsonl"]
    assert '"looked-at"' in files["cri/pods.json"]
    assert '"service_token"' in files["cni/configuration/99-other.conf"]
    assert any("tap0" in text for path, text in files.items() if path.startswith("namespaces/virtshim-"))
    assert "serve.py" in files["threads/virtshim.txt"]
    assert "thread" in files["threads/tapmanager.txt"]
    assert "in Python" not in files["threads/virtshim-shares.txt"]
    assert "tapmanager.ready" in files["logs/tapmanager.log"]
    assert "libvirt.connection.opened" in files["logs/virtshim.log"]
    assert any("memory" in text for path, text in files.items() if path.startswith("cgroups/0"))
    assert f"guest={domain}" in files["processes/all.txt"]
    assert re.search(rf"^ *{foreign.pid} +[A-Z] +\[", files["processes/all.txt"], re.MULTILINE)
    assert json.loads(files["check/findings.json"])

    node.stop(signal.SIGINT)
    try:
        summary, files = taken(node, tmp_path)
    finally:
        conf.unlink()
        kubeconfig.unlink()
        node.up()
    assert {name: part["trouble"] for name, part in summary["parts"].items() if part["trouble"]} == {}
    assert "does not run" in files["threads/virtshim.txt"]
    assert f"{domain:<40} running" in files["domains/states.txt"], "QEMU runs on"
    assert '"looked-at"' in files["store/sandboxes.jsonl"]
    assert "UNAVAILABLE" in files["cri/status.txt"]
    assert "serve.stopped" in files["logs/virtshim.log"]
    assert [path for path, text in files.items() if "planted" in text.lower()] == []
