"""In this chapter, the kernel moves a guest's frames (vhost-net), for a NIC with two queues. It runs before there is a
node. tapmanager and vmwrapper are real, and the guest's QEMU is started as libvirt would, confined and as its own
user."""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cluster import WAIT_LIMIT
from podclient import wait_until
from telling import Report

from tapmanager import protocol
from tapmanager.links import netns
from tapmanager.links.tap import VHOST_DEVICE, VhostNet, vhost_trouble

PROJECT = Path(__file__).resolve().parents[2]
QUEUES = 2
ANSWER = "hello, guest"
VM_USER = 2130706000

_HOME = Path("/run/vhost")
_SOCKET = str(_HOME / "t.sock")
# The guest's EtherType, which IEEE 802 reserves for experiments.
_EXPERIMENT = b"\x88\xb5"
_EVERY_KIND = 0x0003
_BRIDGE = "vhostbr0"
_LIMITS = {
    "cpu_shares": 0,
    "cpu_quota": 0,
    "cpu_period": 0,
    "cpuset_cpus": "",
    "cpuset_mems": "",
    "memory": 0,
    "swap": None,
}


def tell(report: Report) -> None:
    with report.step("vhost: the kernel's") as facts:
        facts["before"] = vhost_trouble()
        loaded = subprocess.run(["modprobe", "vhost_net"], capture_output=True, check=False).returncode == 0
        facts["there"] = loaded
        if not loaded:
            return
        facts["after"] = vhost_trouble()
        fds = VhostNet().open(3)
        facts["descriptors"] = [(os.readlink(f"/proc/self/fd/{fd}"), os.get_inheritable(fd)) for fd in fds]
        for fd in fds:
            os.close(fd)
    sandbox = secrets.token_hex(32)
    with ExitStack() as stack:
        with report.step("vhost: a pod's network") as facts:
            _HOME.mkdir(mode=0o755)
            stack.callback(shutil.rmtree, _HOME)
            stack.enter_context(_tapmanager())
            key = _attached(sandbox)
            stack.callback(_ask, "release", {"sandbox": sandbox})
        with report.step("vhost: in the guest") as facts, _answering(netns.path_of("/run/netns", sandbox)):
            facts.update(_boot(sandbox, key))
    with report.step("vhost: removed") as facts:
        subprocess.run(["ip", "link", "del", _BRIDGE], check=True)
        facts["threads"] = _kernel_threads()


@contextmanager
def _tapmanager() -> Iterator[None]:
    ipam = {"type": "host-local", "dataDir": f"{_HOME}/leases", "ranges": [[{"subnet": "10.98.0.0/24"}]]}
    plugin = {"type": "bridge", "bridge": _BRIDGE, "isGateway": True, "ipam": ipam}
    (_HOME / "cni").mkdir()
    (_HOME / "cni/10.conflist").write_text(json.dumps({"cniVersion": "1.0.0", "name": "vhost", "plugins": [plugin]}))
    words = ["--socket", _SOCKET, "--state-dir", f"{_HOME}/ledger", "--cni-conf-dir", f"{_HOME}/cni"]
    process = subprocess.Popen([sys.executable, "-m", "tapmanager", *words], cwd=PROJECT)
    try:
        wait_until(lambda: process.poll() is not None or _serves(), WAIT_LIMIT, "tapmanager serves")
        yield
    finally:
        process.terminate()
        process.wait(60)


def _serves() -> bool:
    try:
        return _ask("list", {}) == {"sandboxes": []}
    except OSError:
        return False


def _ask(verb: str, args: dict[str, Any]) -> dict[str, Any]:
    answer, fds = protocol.call(_SOCKET, verb, args, WAIT_LIMIT)
    protocol.close_all(fds)
    return answer


def _attached(sandbox: str) -> str:
    """Attaches a pod for a VM with two queues; returns the key to its taps."""
    pod = {"namespace": "default", "name": "vhost", "uid": "uid-1"}
    network = _ask("attach", {"sandbox": sandbox, "pod": pod, "multi_queue": True})
    group = {
        "sandbox": sandbox,
        "uid": VM_USER,
        "container": "c" * 64,
        "parent": "",
        "limits": _LIMITS,
        "oom_score_adj": 0,
    }
    _ask("group", {**group, "queues": QUEUES})
    return str(network["fetch_key"])


def _boot(sandbox: str, key: str) -> dict[str, Any]:
    """Boots the guest; returns its output and its QEMU's resources. QEMU is ended afterwards."""
    subprocess.run([sys.executable, "-m", "vmwrapper.bundle", f"{_HOME}/vmwrapper"], cwd=PROJECT, check=True)
    disk, console = _HOME / "disk.qcow2", _HOME / "console"
    shutil.copy(PROJECT / "build/vfio/devices.qcow2", disk)
    console.touch()
    for path in (disk, console):
        os.chown(path, VM_USER, -1)
    environment = {
        "PATH": os.environ["PATH"], "VIRTSHIM_SANDBOX": sandbox, "VIRTSHIM_FETCH_KEY": key, "VIRTSHIM_TAPMANAGER": _SOCKET,
        "VIRTSHIM_CONFINE": "landlock,seccomp",
    }  # fmt: skip
    words = [
        "setpriv", f"--reuid={VM_USER}", f"--regid={pwd.getpwnam('libvirt-qemu').pw_gid}", "--clear-groups", "--no-new-privs",
        f"{_HOME}/vmwrapper", "-machine", "q35", "-accel", "tcg", "-cpu", "max", "-m", "32", "-nodefaults", "-no-user-config",
        "-display", "none", "-drive", f"file={disk},format=qcow2,if=virtio",
        "-chardev", f"file,id=console,path={console}", "-serial", "chardev:console",
        "-global", "virtio-net-pci.disable-legacy=on",  # of which the device guest knows nothing
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]  # fmt: skip
    process = subprocess.Popen(words, env=environment)
    try:
        wait_until(
            lambda: process.poll() is not None or b"device guest: done" in console.read_bytes(), WAIT_LIMIT, "the guest"
        )
        return {"console": console.read_text().splitlines(), **_of_process(process.pid)}
    finally:
        process.kill()
        process.wait()


@contextmanager
def _answering(namespace: str) -> Iterator[None]:
    """Answers at the tap itself, because the spoofing filter drops these frames."""

    def at_the_tap() -> socket.socket:
        # The bridge takes a frame before those who have asked for its kind see it.
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_KIND))
        made.bind(("tap0", _EVERY_KIND))
        return made

    def answer(to: socket.socket) -> None:
        frame = b""
        while frame[12:14] != _EXPERIMENT:
            frame = to.recv(2048)
        to.send(frame[6:12] + bytes.fromhex("020000000001") + frame[12:14] + ANSWER.encode().ljust(46, b"\0"))

    with netns.run_inside(namespace, at_the_tap) as tap:
        tap.settimeout(WAIT_LIMIT)
        threading.Thread(target=answer, args=(tap,), daemon=True).start()
        yield


def _of_process(pid: int) -> dict[str, Any]:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return {
        "netdev": re.sub(r"(?<=[=:])[0-9]+(?=[:,]|$)", "N", next(word for word in words if word.startswith("tap,"))),
        "device": next(word for word in words if "virtshimnic0" in word),
        "user": Path(f"/proc/{pid}").stat().st_uid,
        "descriptors": [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()].count(VHOST_DEVICE),
        "threads": _kernel_threads(),
    }


def _kernel_threads() -> int:
    """vhost's threads: kernel threads, or since Linux 6.4 threads of the process that they serve."""
    names = (path.read_text() for path in Path("/proc").glob("[0-9]*/task/[0-9]*/comm"))
    return sum(name.startswith("vhost-") for name in names)
