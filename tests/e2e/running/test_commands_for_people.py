"""The commands for people work without kubectl."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from node import VIRTSHIM
from running_vm import NAME, Vm
from terminal import LIMIT, terminal

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]


def test_a_person_lists_the_vms_and_runs_commands(vm: Vm):
    listed = vm.command("ps").stdout.decode().splitlines()
    assert listed[0].split()[:2] == ["POD", "POD"]
    words = listed[1].split()
    assert words[0] == f"default/{NAME}"
    assert vm.container[:12] in words
    assert "running" in words
    assert vm.address in words

    done = vm.command("exec", f"default/{NAME}", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    data = os.urandom(300_000)
    done = vm.command("exec", "-i", vm.container[:10], "--", "cat", stdin=data)
    assert (done.returncode, done.stdout) == (0, data)
    assert vm.command("exec", NAME, "--", "no-such-program").returncode == 127
    done = vm.command("exec", "nobody", "--", "id")
    assert (done.returncode, b"virtshim ps" in done.stderr) == (66, True)


def test_a_command_in_a_vm_that_was_not_started_is_refused(vm: Vm, null_image: Path, image_url: str):
    with vm.beside("idle", f"{image_url}/{null_image.name}"):
        assert b"is created, not running" in vm.command("exec", "idle", "--", "id").stderr


def test_a_person_types_on_the_console(vm: Vm):
    with terminal([*VIRTSHIM, "console", "--socket", vm.node.socket, NAME]) as screen:
        assert screen.sees(b"Ctrl-] leaves"), screen.seen
        assert screen.is_answered_by_a_shell(), screen.seen
        screen.press(b"\x1d")
        assert screen.sees(b"the VM keeps running"), screen.seen
        assert screen.process.wait(LIMIT) == 0
    assert vm.cri.status(vm.container).state == pb.CONTAINER_RUNNING


def test_a_persons_port_leads_to_the_guests_until_ctrl_c(vm: Vm):
    command = [*VIRTSHIM, "port-forward", "--socket", vm.node.socket, NAME, ":80"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as forwarding:
        assert forwarding.stderr is not None
        told = forwarding.stderr.readline()
        address, end = told.removeprefix("port-forward: ").split(" ", 1)
        assert end.startswith(f"leads to port 80 of {NAME}")
        for _ in range(2):
            with urllib.request.urlopen(f"http://{address}/", timeout=60) as answer:
                assert NAME.encode() in answer.read()
        forwarding.send_signal(signal.SIGINT)
        assert forwarding.wait(LIMIT) == 0


def test_a_person_looks_after_images(vm: Vm, image_url: str):
    unused = f"{image_url}/null.qcow2"
    vm.cri.pull(unused)
    listed = vm.command("images", "--filter", "null.qcow2").stdout.decode()
    assert "null.qcow2" in listed
    assert "guest.qcow2" not in listed
    (used,) = vm.command("images", "--filter", "guest.qcow2", "-q").stdout.decode().split()
    refused = vm.command("rmi", used)
    assert (refused.returncode, f"in use by pod default/{NAME}" in refused.stderr.decode()) == (75, True)
    assert vm.command("rmi", "example.com/none:1").returncode == 66
    assert vm.command("rmi", unused).returncode == 0
    assert vm.command("images", "--filter", "null.qcow2", "-q").stdout.split() == []

    vm.cri.pull(unused)
    for options, word in ((["--dry-run"], "would remove"), ([], "removed")):
        prune = [*VIRTSHIM, "image", "prune", "--socket", vm.node.socket, *options]
        said = subprocess.run(prune, capture_output=True, text=True, check=True).stdout
        assert f"{word} {unused}" in said
        assert "guest.qcow2" not in said
    assert vm.command("images", "-q").stdout.decode().split() == [used]


def test_a_person_loads_a_disk_file_and_runs_it(vm: Vm, null_image: Path):
    loaded = vm.command("load", str(null_image), "golden:1")
    assert loaded.returncode == 0, loaded.stderr
    packed = gzip.compress(null_image.read_bytes())
    piped = vm.command("load", "-q", "-", "golden:2", stdin=packed)
    assert piped.stdout == loaded.stdout
    assert "golden:2" in vm.command("images", "--filter", "golden").stdout.decode()

    ran = vm.command("run", "-d", "--name", "gold", "--memory", "64Mi", "golden:2")
    assert ran.returncode == 0, ran.stderr
    try:
        assert "default/gold" in vm.command("ps").stdout.decode()
    finally:
        assert vm.command("rm", "--force", "gold").returncode == 0
    assert vm.command("rmi", "golden:1").returncode == 0
    assert vm.command("images", "-q", "--filter", "golden").stdout.split() == []

    for file, name, code, word in (("/none", "a:1", 66, b"does not exist"), ("/", "a:1", 78, b"cannot be read")):
        refused = vm.command("load", file, name)
        assert (refused.returncode, word in refused.stderr) == (code, True)
    assert b"empty" in vm.command("load", str(null_image), "").stderr
    garbage = vm.command("load", "-", "garbage:1", stdin=b"<html>")
    assert (garbage.returncode, b"a web page or XML" in garbage.stderr) == (78, True)
    assert vm.command("images", "-q", "--filter", "garbage").stdout.split() == []


def test_a_person_copies_files_and_directories_in_and_out(vm: Vm, tmp_path: Path):
    site = tmp_path / "site"
    (site / "deep").mkdir(parents=True)
    data = os.urandom(2_000_000)
    (site / "deep" / "data").write_bytes(data)
    (site / "script").write_text("#!/bin/sh\n")
    (site / "script").chmod(0o755)

    assert vm.command("cp", str(site), f"{NAME}:/tmp").returncode == 0
    assert vm.run("/tmp/site/script").exit_code == 0
    assert vm.command("cp", str(site / "script"), f"{NAME}:/tmp/site/renamed").returncode == 0
    refused = vm.command("cp", str(site), f"{NAME}:/nowhere/x")
    assert (refused.returncode, b"mkdir -p" in refused.stderr) == (66, True)

    back = tmp_path / "back"
    assert vm.command("cp", f"{NAME}:/tmp/site", str(back)).returncode == 0
    assert (back / "deep" / "data").read_bytes() == data
    assert sorted(os.listdir(back)) == ["deep", "renamed", "script"]
    assert (back / "script").stat().st_mode & 0o777 == 0o755
    missing = vm.command("cp", f"{NAME}:/tmp/none", str(tmp_path))
    assert (missing.returncode, b"none" in missing.stderr) == (75, True)
    assert vm.run("ln", "-s", "/etc/passwd", "/tmp/site/link").exit_code == 0
    partly = vm.command("cp", f"{NAME}:/tmp/site", str(tmp_path / "again"))
    assert (partly.returncode, b"site/link" in partly.stderr) == (1, True)
    assert not os.path.lexists(tmp_path / "again" / "link")
