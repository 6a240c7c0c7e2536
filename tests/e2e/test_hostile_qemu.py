"""A QEMU that its guest has taken over may write only little on the node, and cannot mislead root."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest
from fakes.spdy import close_all, spdy
from node import Node
from podclient import PodClient, container_config, pod_config

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.vm.disk_chains import OPEN_IMAGES_SINCE

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.hostile]


@pytest.fixture
def running(cri: PodClient, node: Node, image_url: str) -> tuple[str, str]:
    """Sandbox and container of a VM with a screen; its guest need not boot."""
    config = pod_config("taken", f"{node.directory}/logs/taken", annotations={"virtshim.io/vnc": "true"})
    pod = cri.run_pod(config)
    container = cri.create(pod, container_config(cri.pull(f"{image_url}/null.qcow2")), config)
    cri.start(container)
    return pod, container


def qemu(node: Node, container: str) -> int:
    (pid,) = Path(node.directory, "libvirt/run/qemu").glob(f"virtshim-{container[:12]}*.pid")
    return int(pid.read_text())


def ids_of(pid: int) -> tuple[int, frozenset[int]]:
    text = Path(f"/proc/{pid}/status").read_text()
    user = re.search(r"^Uid:\s+\d+\s+(\d+)", text, re.MULTILINE)
    groups = re.search(r"^Groups:(.*)$", text, re.MULTILINE)
    group = re.search(r"^Gid:\s+\d+\s+(\d+)", text, re.MULTILINE)
    assert user
    assert groups
    assert group
    return int(user[1]), frozenset(map(int, [*groups[1].split(), group[1]]))


def writable(directory: Path, user: int, groups: frozenset[int]) -> Iterator[Path]:
    """The writable files below it, by names that this user can follow."""
    for path in sorted(directory.iterdir()):
        found = path.lstat()
        shift = 6 if found.st_uid == user else 3 if found.st_gid in groups else 0
        if stat.S_ISLNK(found.st_mode):
            continue
        if found.st_mode >> shift & 0o2:
            yield path
        if stat.S_ISDIR(found.st_mode) and found.st_mode >> shift & 0o1:
            yield from writable(path, user, groups)


def test_a_qemu_may_write_only_its_disk_and_key_and_connect_only_to_tapmanager(
    node: Node, running: tuple[str, str]
) -> None:
    """Sockets and logs of monitors, consoles, agents and screens are in directories that QEMU cannot enter or cannot
    write."""
    _, container = running
    user, groups = ids_of(qemu(node, container))
    assert user != 0
    top = Path(node.directory)
    names = [re.sub("/domain-[0-9]+-", "/", str(path.relative_to(top))) for path in writable(top, user, groups)]
    assert names == [
        f"libvirt/lib/qemu/virtshim-{container[:11]}/master-key.aes",
        "run/tapmanager.sock",
        f"state/containers/{container}/root.qcow2",
    ]


@pytest.mark.skipif(libvirt.getVersion() < OPEN_IMAGES_SINCE, reason="NOT TESTED: needs libvirt 9.0")
def test_files_of_a_vm_are_not_readable_by_its_group(cri: PodClient, node: Node, running: tuple[str, str]) -> None:
    """Neither another VM's QEMU nor a user of the node in that group can read them, and not even the VM's own user can
    read the image."""
    _, container = running
    user, groups = ids_of(qemu(node, container))
    image = Path(node.directory, "state/images/sha256", cri.status(container).image_ref.rpartition(":")[2])
    own = [Path(node.directory, "state/containers", container, name) for name in ("root.qcow2", "seed.iso")]
    assert all(path.stat().st_uid == user for path in own)
    assert [path for path in own if reads(path, user, groups)] == own
    assert [path for path in (*own, image) if reads(path, user + 1, groups)] == []
    assert not reads(image, user, groups)


def reads(path: Path, user: int, groups: frozenset[int]) -> bool:
    as_user = ("setpriv", f"--reuid={user}", f"--regid={min(groups)}", f"--groups={','.join(map(str, groups))}")
    return subprocess.run((*as_user, "head", "-c1", path), capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "attempt",
    [
        "ln -sfn {run}/virtshim.sock {own}/monitor.sock",
        "mv {own}/monitor.sock {own}/gone",
        "mv {own} {own}.gone",
        "ln -sn /etc {lib}/domain-2-virtshim-next",
        "mv {lib}/snapshot {lib}/gone",
        "touch {lib}/save/planted",
        "touch {state}/run/qemu/dbus/planted",
    ],
)
def test_a_qemu_cannot_write_where_libvirt_opens_or_creates_files_as_root(
    node: Node, running: tuple[str, str], attempt: str
) -> None:
    _, container = running
    user, groups = ids_of(qemu(node, container))
    state = Path(node.directory, "libvirt")
    (own,) = (state / "lib/qemu").glob(f"domain-*-virtshim-{container[:11]}")
    script = attempt.format(own=own, lib=f"{state}/lib/qemu", state=state, run=f"{node.directory}/run")
    as_qemu = ("setpriv", f"--reuid={user}", f"--regid={min(groups)}", f"--groups={','.join(map(str, groups))}")
    done = subprocess.run((*as_qemu, "sh", "-c", script), capture_output=True, text=True, check=False)
    assert "Permission denied" in done.stderr


def test_a_screen_socket_that_links_to_a_socket_of_the_node_is_not_forwarded(
    cri: PodClient, node: Node, running: tuple[str, str]
) -> None:
    pod, container = running
    screen = Path(node.directory, "run/vnc", container[:20], "vnc.sock")
    client = spdy(cri.runtime.PortForward(pb.PortForwardRequest(pod_sandbox_id=pod)).url, "portforward.k8s.io")
    client.open(streamtype="error", fin=True, port="5900", requestid="0")
    data = client.open(streamtype="data", port="5900", requestid="0")
    client.until(lambda: bytes(client.received[data]) == b"RFB 003.008\n")

    real = screen.rename(screen.with_name("real"))
    for lure in (node.socket, f"{node.directory}/run/tapmanager.sock"):
        screen.symlink_to(lure)
        error = client.open(streamtype="error", fin=True, port="5900", requestid=lure)
        data = client.open(streamtype="data", port="5900", requestid=lure)
        assert b"not a socket" in client.read_all(error)
        assert client.read_all(data) == b""
        screen.unlink()
    os.link(node.socket, screen)
    error = client.open(streamtype="error", fin=True, port="5900", requestid="9")
    client.open(streamtype="data", port="5900", requestid="9")
    assert b"belongs to user 0" in client.read_all(error)
    screen.unlink()
    real.rename(screen)
    close_all()
