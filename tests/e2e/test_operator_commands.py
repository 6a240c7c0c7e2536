"""Operator commands work on a real VM with a screen, and on VMs of `virtshim run`."""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest import BOOT, READY
from node import VIRTSHIM, Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until
from terminal import terminal

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.operator]

LIMIT = 120.0


def virtshim(node: Node, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*VIRTSHIM, name, "--socket", node.socket, *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=False)


def done(node: Node, name: str, *words: str) -> str:
    ended = virtshim(node, name, *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def facts(node: Node, name: str, *words: str) -> dict:
    return json.loads(done(node, name, "--json", *words))


@contextlib.contextmanager
def events(node: Node) -> Iterator[subprocess.Popen[str]]:
    command = [*VIRTSHIM, "events", "--socket", node.socket, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_operator_commands_work_on_a_running_vm(
    cri: PodClient, node: Node, image_url: str, tmp_path: Path, request: pytest.FixtureRequest
):
    restarts = ("reboot", "reset") if request.config.getoption("--all") else ("reboot",)
    image = f"{image_url}/guest.qcow2"
    assert facts(node, "pull", image)["image"] == image
    assert image.partition("/")[2] in done(node, "images")
    config = pod_config("day", f"{node.directory}/logs/day", {"virtshim.io/vnc": "true"})
    pod = cri.run_pod(config)
    vm = cri.create(pod, container_config(cri.pull(image)), config)
    log = cri.status(vm).log_path
    with events(node) as told:
        cri.start(vm)
        assert told.stdout is not None
        wait_for_log(log, READY, BOOT)
        wait_until(lambda: "agent" in over(node, vm), BOOT, "its agent is noticed before anybody asks it anything")
        assert done(node, "exec", "day", "--", "echo", "up") == "up\n"

        # --- looking
        assert {"network", "disk", "libvirt", "firmware", "agent"} <= over(node, vm).keys()
        assert "day" in done(node, "ps")
        assert [one["vms"][0]["id"] for one in facts(node, "ps") if one["name"] == "day"] == [vm]
        assert [row["memory"] > 0 for row in facts(node, "top") if row["pod"] == "default/day"] == [True]
        assert READY in done(node, "logs", "--tail", "20", "day")
        assert done(node, "logs", "--since", "0s", "day") == ""
        assert f"({vm[:12]}), running" in done(node, "inspect", "day")
        assert vm in done(node, "dumpxml", "day")
        assert "fetch_key" not in done(node, "dumpxml", "day")
        picture = tmp_path / "screen.png"
        assert done(node, "screenshot", "-o", str(picture), "day").strip() == str(picture)
        assert is_picture(picture.read_bytes())

        # --- pausing
        assert facts(node, "pause", "day")["changed"]
        assert not facts(node, "pause", "day")["changed"]
        status = cri.status(vm)
        assert (status.state, "virtshim resume" in status.message) == (1, True)
        refused = virtshim(node, "exec", "day", "--", "true")
        assert (refused.returncode, "virtshim resume" in refused.stderr) == (75, True)
        assert "paused" in done(node, "ps")
        assert virtshim(node, "freeze", "day").returncode == 75
        assert facts(node, "resume", "day")["changed"]
        assert done(node, "exec", "day", "--", "echo", "goes on") == "goes on\n"

        # --- freezing (this guest has all its files in memory)
        refused = virtshim(node, "freeze", "day")
        assert (refused.returncode, "no file system that can be frozen" in refused.stderr) == (75, True)
        assert done(node, "exec", "day", "--", "echo", "goes on") == "goes on\n"

        # --- restarting
        for count, action in enumerate(restarts, start=2):
            assert facts(node, action, "day")["changed"]
            wait_until(lambda count=count: boots(log) == count, BOOT, f"it boots again after {action}")
        assert cri.status(vm).state == 1

        # --- a paused VM is stopped as any other
        done(node, "pause", "day")
        cri.stop(vm, 60)
        assert cri.status(vm).exit_code in (0, 143), cri.status(vm).message
        seen = []
        while "vm stopped" not in seen:
            seen.append(json.loads(told.stdout.readline())["what"])
        actions = ["pause", "resume", *restarts, "pause"]
        assert [one for one in seen if one in actions] == actions
    assert virtshim(node, "pause", "day").returncode == 75
    assert virtshim(node, "pause", "nobody").returncode == 66
    cri.stop_pod(pod)
    cri.remove_pod(pod)


def over(node: Node, vm: str) -> dict:
    return {one["name"]: one for one in facts(node, "inspect", vm[:12])["phases"] if one["isOver"]}


def boots(log: str) -> int:
    return sum(READY in line for line in log_lines(log))


def is_picture(data: bytes) -> bool:
    width, height = struct.unpack(">II", data[16:24])
    rows = zlib.decompress(data[data.index(b"IDAT") + 4 :][: struct.unpack(">I", data[33:37])[0]])
    return data.startswith(b"\x89PNG") and len(rows) == height * (1 + 3 * width)


def test_a_vm_of_virtshim_run_is_removed_when_it_is_left_ends_or_is_killed(cri: PodClient, node: Node, image_url: str):
    run = [*VIRTSHIM, "run", "--socket", node.socket, "--memory", "128Mi", f"{image_url}/guest.qcow2"]

    # Its command's output and exit code are those of `run`.
    ended = subprocess.run(
        [*run, "--env", "WORD=hello", "--", "sh", "-c", "echo $WORD; exit 7"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BOOT + LIMIT, check=False,
    )  # fmt: skip
    assert ended.returncode == 7, ended.stderr
    assert "hello" in ended.stdout
    assert cri.pods() == []

    # The command reads what is piped in, up to its end.
    counted = subprocess.run(
        [*run, "-q", "--", "sh", "-c", "wc -c"],
        input=b"abc\n", capture_output=True, timeout=BOOT + LIMIT, check=False,
    )  # fmt: skip
    assert (counted.returncode, counted.stdout.split()) == (0, [b"4"]), counted.stderr
    assert cri.pods() == []

    # Without input it shows the console until it is told to end.
    with subprocess.Popen([*run, "-q"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as shown:
        assert shown.stdout is not None
        assert any(READY.encode() in line for line in shown.stdout)
        shown.send_signal(signal.SIGINT)
        assert shown.wait(LIMIT) == 128 + signal.SIGINT
    assert cri.pods() == []

    # On a terminal it shows the console; ctrl-] leaves and removes the VM.
    with terminal([*run, "--name", "by-hand"]) as screen:
        assert screen.sees(READY.encode(), BOOT), screen.seen
        assert [pod.metadata.name for pod in cri.pods()] == ["by-hand"]
        screen.press(b"\x1d")
        assert screen.process.wait(LIMIT) == 0
        assert cri.pods() == []

    # A signal that ends it leaves nothing behind.
    with subprocess.Popen([*run, "-q"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as killed:
        wait_until(lambda: any(one.state == 1 for one in cri.containers()), LIMIT, "it runs")
        killed.send_signal(signal.SIGTERM)
        assert killed.wait(LIMIT) == 128 + signal.SIGTERM
    assert cri.pods() == []


def test_a_vm_of_run_d_keeps_its_disk_over_stop_and_start_until_it_is_removed(
    cri: PodClient, node: Node, image_url: str
):
    name, sector = ("--name", "stays"), "bs=512 count=1 of=/dev/vda seek=100000 conv=sync,notrunc,fsync"
    size = ("--memory", "128Mi", "--annotation", "VirtletRootVolumeSize=64Mi")
    first = done(node, "run", "-d", *name, *size, f"{image_url}/guest.qcow2").strip()
    assert [row["vms"][0]["id"] for row in facts(node, "ps")] == [first]
    assert "virtshim start stays" in virtshim(node, "run", "-d", *name, f"{image_url}/guest.qcow2").stderr
    wait_until(lambda: virtshim(node, "exec", "stays", "--", "true").returncode == 0, BOOT, "its agent answers")
    done(node, "exec", "stays", "--", "sh", "-c", f"echo kept | dd {sector}")
    done(node, "stop", "stays")
    assert [one.state for one in cri.containers()] == [2]
    second = done(node, "start", "stays").strip()
    assert [(one.id, one.state) for one in cri.containers()] == [(second, 1)]
    wait_until(lambda: virtshim(node, "exec", "stays", "--", "true").returncode == 0, BOOT, "its agent answers")
    read = "dd if=/dev/vda bs=512 count=1 skip=100000 2>/dev/null | tr -d '\\0'"
    assert done(node, "exec", "stays", "--", "sh", "-c", read) == "kept\n"
    third = done(node, "restart", "stays").strip()
    assert third != second
    assert [(one.id, one.state) for one in cri.containers()] == [(third, 1)]
    assert "--force" in virtshim(node, "rm", "stays").stderr
    done(node, "rm", "--force", "stays")
    assert (cri.pods(), facts(node, "vms")) == ([], [])
