"""A guest has copies of ConfigMaps, Secrets and the token, which are updated when kubelet writes."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
from fakes.kubelet_writer import WrittenVolume
from guest import BOOT, READY, answers
from node import Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.volumes]

TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"


def says(cri: PodClient, container: str, script: str) -> str:
    done = cri.exec_sync(container, "sh", "-c", script)
    assert done.exit_code == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


def reads(cri: PodClient, container: str, script: str, wanted: str) -> bool:
    """Reads a file that may not exist yet."""
    return cri.exec_sync(container, "sh", "-c", script).stdout.decode() == wanted


def test_a_guest_has_copies_of_kubelets_volumes_and_their_changes(
    cri: PodClient, node: Node, image_url: str, tmp_path: Path
) -> None:
    config = pod_config("texts", f"{node.directory}/logs/texts")
    uid = config.metadata.uid
    texts = WrittenVolume(tmp_path, uid, "configmap", "texts")
    token = WrittenVolume(tmp_path, uid, "projected", "kube-api-access-x")
    odd = "an odd\n$(exit 7) name"
    texts.write({"a": b"1\n", "b": b"1\n", odd: b"odd\n"})
    token.write({"token": b"first\n"}, mode=0o640, group=2000)
    part = tmp_path / "pods" / uid / "volume-subpaths" / "texts" / "vm" / "0"
    part.parent.mkdir(parents=True)
    part.write_text("a part\n")
    hosts = tmp_path / "pods" / uid / "etc-hosts"
    hosts.write_text("10.1.2.3 first.local\n")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    for path, host in (
        ("/etc/texts", texts.path),
        (TOKEN, token.path),
        ("/etc/part.conf", part),
        ("/etc/hosts", hosts),
    ):
        wanted.mounts.add(container_path=path, host_path=str(host), readonly=path != "/etc/hosts")
    made = cri.create(pod, wanted, config)
    cri.start(made)
    log = cri.status(made).log_path
    wait_for_log(log, READY, BOOT)

    read = f"cat {TOKEN}/token /etc/part.conf /etc/texts/*"
    wait_until(partial(reads, cri, made, read, "first\na part\n1\nodd\n1\n"), 60, "the guest has them")
    assert (
        says(cri, made, f"stat -L -c '%u %g %a' {TOKEN}/token; readlink {TOKEN}/token") == "0 2000 640\n..data/token\n"
    )
    assert cri.exec_sync(made, "sh", "-c", "echo > /etc/texts/a").exit_code != 0, "it is read-only"
    paths = {"/etc/texts", TOKEN, "/etc/part.conf", "/etc/hosts"}
    assert {mount.container_path for mount in cri.status(made).mounts} == paths
    hosts.write_text("10.1.2.4 second.local\n")
    wait_until(partial(reads, cri, made, "cat /etc/hosts", "10.1.2.4 second.local\n"), 60, "the guest has its change")
    assert not os.path.exists(f"{node.directory}/run/shares/{made[:20]}"), "no daemon serves them"

    looks = "until [ -e /run/stop ]; do [ -s /etc/texts/a ] && [ -s /etc/texts/b ] || : >/run/torn; done"
    says(cri, made, f"({looks}) >/dev/null 2>&1 &")
    for number in ("2", "3"):
        texts.write({"a": f"{number}\n".encode(), "b": f"{number}\n".encode()})
        wait_until(partial(reads, cri, made, "cat /etc/texts/*", f"{number}\n{number}\n"), 60, "the guest has it")
    assert says(cri, made, "touch /run/stop; ls /etc/texts").split() == ["a", "b"]
    assert "torn" not in says(cri, made, "ls /run")

    victim = node.daemons()["virtshim"]
    os.kill(victim, signal.SIGKILL)
    token.write({"token": b"second\n"}, mode=0o640, group=2000)
    wait_until(lambda: node.daemons().get("virtshim", victim) != victim, 60, "virtshim runs again")
    wait_until(lambda: answers(cri), 60, "the CRI socket serves")
    wait_until(partial(reads, cri, made, read, "second\na part\n3\n3\n"), 60, "the token is the new one")

    cri.exec_sync(made, "sh", "-c", "(sleep 1; echo b >/proc/sysrq-trigger) >/dev/null 2>&1 &")
    wait_until(lambda: sum(READY in line for line in log_lines(log)) == 2, BOOT, "the guest is up again")
    wait_until(partial(reads, cri, made, read, "second\na part\n3\n3\n"), 60, "it has them again")
    cri.remove_pod(pod)
