"""A real node refuses a hostile author's settings, or they affect only the author's own VM, in the guest, too."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import cri as ordinary
from guest import BOOT
from lxml import etree
from node import Node
from pod_author import FORGED, HARMLESS, REFUSED_CONTAINERS, REFUSED_PODS, Attempt, judge
from podclient import PodClient, container_config, log_lines, pod_config, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.hostile]

# Text that a shell, a loader or a log would interpret.
ODD = "'\"; touch /tmp/pwned; $(touch /tmp/pwned) `touch /tmp/pwned` \\\n%n\x1b[2J <x/> &amp; \u202e"
MEMORY = 128 << 20


@pytest.fixture
def logs(node: Node) -> str:
    return f"{node.directory}/logs/author"


@pytest.fixture
def unharmed(cri: PodClient, node: Node) -> Iterator[None]:
    """Afterwards the node serves others, keeps nothing of the attempts, and has no forged log line."""
    state = Path(node.directory, "state")
    kept = [state / name for name in ("containers", "tapmanager")]
    before, began = [sorted(os.listdir(place)) for place in kept], len(node.log())
    daemons = node.daemons()
    yield
    for there in cri.pods():
        cri.remove_pod(there.id)
    assert [sorted(os.listdir(place)) for place in kept] == before
    assert node.daemons() == daemons, "neither daemon fell"
    said = node.log()[began:]
    assert not re.search(r"^2026-01-01T00:00:00Z|\x1b\[2J|Traceback", said, re.MULTILINE)
    other = cri.run_pod(pod_config("other", f"{node.directory}/logs/other"))
    assert cri.pod_ip(other)
    cri.remove_pod(other)


def refused(attempt: Attempt, call: Any, *arguments: Any) -> None:
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments)
    judge(error.value, attempt)


def test_forbidden_pod_settings_are_refused(cri: PodClient, logs: str, unharmed: None) -> None:
    for attempt in REFUSED_PODS:
        refused(attempt, cri.run_pod, ordinary.pod(**{"log_directory": logs} | attempt.changes))
    assert cri.pods() == []
    assert not Path(logs).exists()


def test_forbidden_container_settings_are_refused(cri: PodClient, logs: str, image_url: str, unharmed: None) -> None:
    config = pod_config("author", logs)
    pod, image = cri.run_pod(config), pb.ImageSpec(image=cri.pull(f"{image_url}/null.qcow2"))
    for attempt in REFUSED_CONTAINERS:
        refused(attempt, cri.create, pod, ordinary.container(**{"image": image} | attempt.changes), config)
    assert cri.containers() == []
    assert cri.create(pod, ordinary.container(image=image), config), "an ordinary one can still be made"


def test_harmless_settings_make_a_vm_with_its_own_files_only(
    cri: PodClient, node: Node, logs: str, image_url: str, unharmed: None
) -> None:
    """libvirt accepts the definitions."""
    image = pb.ImageSpec(image=cri.pull(f"{image_url}/null.qcow2"))
    wanted = definition(node, *made(cri, logs, image, {}, {}))
    for harmless in HARMLESS:
        assert definition(node, *made(cri, logs, image, harmless.pod, harmless.container)) == wanted, harmless


def made(
    cri: PodClient, logs: str, image: pb.ImageSpec, in_pod: Mapping[str, Any], in_container: Mapping[str, Any]
) -> tuple[str, str]:
    """Creates a pod with its one container; removes the pod before it."""
    for before in cri.pods():
        cri.remove_pod(before.id)
    config = ordinary.pod(**{"log_directory": logs} | dict(in_pod))
    pod = cri.run_pod(config)
    linux = pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(memory_limit_in_bytes=MEMORY))
    container = ordinary.container(**{"image": image} | dict(in_container))
    container.linux.MergeFrom(linux)
    return pod, cri.create(pod, container, config)


def definition(node: Node, pod: str, container: str) -> str:
    """The definition without the parts that differ between VMs."""
    (path,) = Path(node.directory, "libvirt/etc/qemu").glob(f"virtshim-{container[:12]}*.xml")
    root = etree.parse(path).getroot()
    for element in root.findall("title") + root.findall("seclabel"):
        root.remove(element)
    text = etree.tostring(root, encoding="unicode").replace(root.findtext("name", ""), "*")
    for word in (pod, container, container[:20], root.findtext("uuid", "")):
        text = text.replace(word, "*")
    return re.sub(r'<!--.*?-->|(?<=name="VIRTSHIM_FETCH_KEY" value=")\w+', "", text, flags=re.DOTALL)


def test_an_authors_text_reaches_only_his_own_guest_unchanged(
    cri: PodClient, node: Node, logs: str, image_url: str, unharmed: None
) -> None:
    """One VM covers it: symlinks in place of log and termination file, text that a shell would run, invalid commands."""
    victim = Path(node.directory, "precious")
    victim.write_text("precious")
    config = pod_config("author", logs, annotations={"VirtletCloudInitUserData": json.dumps({"x": ODD})})
    config.labels["a"] = FORGED
    pod, image = cri.run_pod(config), cri.pull(f"{image_url}/guest.qcow2")

    Path(logs).mkdir(parents=True, exist_ok=True)
    Path(logs, "away").symlink_to("/etc")
    Path(logs, "file.log").symlink_to(victim)
    for number, name in enumerate(("file.log", "away/cron.d/x")):
        linked = container_config(image, attempt=number)
        linked.log_path = name
        container = cri.create(pod, linked, config)
        refused(Attempt("", {}, "symbolic link"), cri.start, container)
        cri.remove(container)
    assert not Path("/etc/cron.d/x").exists()

    job = container_config(image, attempt=7)
    job.command.extend(["sh", "-c"])
    job.args.extend(
        ["printf '%s|' \"$@\"; printf '%s\\n' \"$ODD\"; until [ -e /run/go ]; do sleep 0.2; done", "sh", ODD, ""]
    )
    for key, value in (("ODD", ODD), ("LD_PRELOAD", "/x.so"), ("A B;reboot", ODD), ("VIRTSHIM_EMULATOR", "/bin/sh")):
        job.envs.add(key=key, value=value.encode())
    last_words = Path(node.directory, "last-words")
    last_words.touch()
    job.mounts.add(container_path="/run/last/words", host_path=str(last_words))
    job.annotations["io.kubernetes.container.terminationMessagePath"] = "/run/last/words"
    container = cri.create(pod, job, config)
    cri.start(container)
    log = cri.status(container).log_path
    said = f"{ODD}||{ODD}".split("\n")
    wait_until(lambda: len(log_lines(log)) >= len(said), BOOT, "its command has said what it was given")
    assert log_lines(log)[: len(said)] == said

    answer = cri.exec_sync(container, "printf", "%s", ODD)
    assert (answer.exit_code, answer.stdout.decode()) == (0, ODD)
    assert cri.exec_sync(container, "test", "-e", "/tmp/pwned").exit_code == 1
    for attempt, words in commands_that_are_none():
        refused(attempt, cri.exec_sync, container, *words)

    # The log is renamed, as kubelet does it, and a link put there; its last words likewise.
    os.rename(log, f"{log}.1")
    Path(log).symlink_to(victim)
    request = pb.ReopenContainerLogRequest(container_id=container)
    refused(Attempt("", {}, "symbolic link"), cri.runtime.ReopenContainerLog, request)
    last_words.unlink()
    last_words.symlink_to(victim)
    assert cri.exec_sync(container, "sh", "-c", "echo ruined > /run/last/words; touch /run/go").exit_code == 0
    wait_until(lambda: cri.status(container).state == pb.CONTAINER_EXITED, 60, "the container has ended")
    assert victim.read_text() == "precious"
    last_words.unlink()


def commands_that_are_none() -> list[tuple[Attempt, tuple[str, ...]]]:
    return [
        (Attempt("", {}, "cmd"), ()),
        (Attempt("", {}, "cmd"), ("",)),
        (Attempt("", {}, "cmd"), ("echo", "a\0b")),
    ]
