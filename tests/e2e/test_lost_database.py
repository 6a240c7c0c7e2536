"""If the state database of a real node is damaged, VMs keep running and the node finds them again. It never touches
objects that are not its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from guest import boot
from leaks import Snapshot
from node import VIRTSHIM, Node, free_cidr
from podclient import PodClient, log_lines, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.faults]

PAGE = 4096


@pytest.fixture
def own_node() -> Iterator[Node]:
    """A node whose state may be damaged; nothing of it is left afterwards."""
    before = Snapshot.take()
    directory = tempfile.mkdtemp(prefix="virtshim-lost-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    node = Node(f"{directory}/n", free_cidr(), "[cri]\nreconcile_interval = 2\n")
    try:
        node.up()
        yield node
    finally:
        if os.path.exists(node.directory):
            node.down()
        shutil.rmtree(directory)
    left = before.settled(seconds=10)
    assert not left, "left behind: " + "; ".join(left)


def overwrite(node: Node, first_page: int) -> None:
    """Overwrites the database from that page on, after SQLite's journal was merged into it."""
    database = Path(f"{node.directory}/state/state.db")
    with contextlib.closing(sqlite3.connect(database, timeout=10)) as whole:
        assert whole.execute("pragma wal_checkpoint(truncate)").fetchone()[0] == 0
    length = database.stat().st_size - first_page * PAGE
    assert length > 0
    with database.open("r+b") as file:
        file.seek(first_page * PAGE)
        file.write(os.urandom(length))


def conditions(cri: PodClient) -> dict[str, tuple[bool, str]]:
    status = cri.runtime.Status(pb.StatusRequest(), timeout=5).status
    return {one.type: (one.status, one.message) for one in status.conditions}


def is_serving(cri: PodClient) -> bool:
    try:
        return all(good for good, _ in conditions(cri).values())
    except grpc.RpcError:
        return False


def answer(cri: PodClient, container: str) -> bytes:
    request = pb.ExecSyncRequest(container_id=container, cmd=["echo", "alive"], timeout=60)
    return bytes(cri.runtime.ExecSync(request, timeout=70).stdout)


def test_a_running_vm_survives_the_loss_of_the_database(own_node: Node, image_url: str) -> None:
    node = own_node
    with PodClient(node.socket) as cri:
        pod, container, log = boot(cri, node, f"{image_url}/guest.qcow2", "kept", annotations={"note": "kept \u00e9"})
        before = cri.pod_status(pod), cri.status(container)
    pids = node.qemu_pids()
    assert len(pids) == 1
    node.stop()
    overwrite(node, 0)
    node.up()
    assert node.qemu_pids() == pids
    with PodClient(node.socket) as cri:
        assert [(one.id, one.state, dict(one.labels), dict(one.annotations)) for one in cri.pods()] == [
            (pod, pb.SANDBOX_READY, dict(before[0].labels), {"note": "kept \u00e9"})
        ]
        after = cri.status(container)
        assert after.state == pb.CONTAINER_RUNNING
        assert (after.metadata, after.image_ref, after.log_path, after.annotations) == (
            before[1].metadata, before[1].image_ref, before[1].log_path, before[1].annotations,
        )  # fmt: skip
        assert cri.pod_status(pod).network == before[0].network
        assert answer(cri, container) == b"alive\n"
        assert sum("virtshim-guest: ready" in line for line in log_lines(log)) == 1
        (image,) = cri.images.ListImages(pb.ListImagesRequest(), timeout=5).images
        assert image.id in before[1].image_ref or image.repo_digests
        damaged_while_it_runs(node, cri, container)
    with PodClient(node.socket) as cri:
        assert node.qemu_pids() == pids
        cri.stop(container, 60)
        assert cri.status(container).exit_code == 143
        cri.remove_pod(pod)
        assert node.qemu_pids() == set()
        for directory in ("state/containers", "run/vm"):
            assert os.listdir(f"{node.directory}/{directory}") == []
    kept = [name for name in os.listdir(f"{node.directory}/state") if "state.db.corrupt-" in name]
    assert len([name for name in kept if not name.endswith(("-wal", "-shm"))]) == 2


def damaged_while_it_runs(node: Node, cri: PodClient, container: str) -> None:
    """Checks that the node reports the damage, that lists answer, and that a restart repairs it."""
    overwrite(node, 2)
    wait_until(lambda: "damaged" in conditions(cri)["RuntimeReady"][1], 60, "Status tells of the damage")
    ready, message = conditions(cri)["RuntimeReady"]
    assert not ready
    assert "restart virtshim" in message
    assert cri.status(container).state == pb.CONTAINER_RUNNING
    os.kill(node.daemons()["virtshim"], 9)
    wait_until(lambda: is_serving(cri), 60, "the node is ready again")
    assert cri.status(container).state == pb.CONTAINER_RUNNING
    assert answer(cri, container) == b"alive\n"


FOREIGN = """<domain type='qemu'><name>{name}</name>{metadata}<memory>65536</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"""
OWNER = (
    "<metadata><v:owner xmlns:v='https://virtshim.io/domain/1' node='{node}' container='{container}'"
    f" sandbox='{'5' * 64}'/></metadata>"
)
DEFINE = """
import sys, threading, libvirt
libvirt.virEventRegisterDefaultImpl()
threading.Thread(target=lambda: [libvirt.virEventRunDefaultImpl() for _ in iter(int, 1)], daemon=True).start()
conn = libvirt.open(sys.argv[1])
for xml in sys.argv[2:]:
    conn.defineXML(xml)
conn.close()
"""


def test_objects_that_are_not_the_nodes_are_never_touched(
    own_node: Node, image_url: str, request: pytest.FixtureRequest
) -> None:
    node = own_node
    with PodClient(node.socket) as cri:
        cri.pull(f"{image_url}/null.qcow2")
    node.stop()
    uri = f"qemu:///embed?root={node.directory}/libvirt"
    this = Path(f"{node.directory}/state/node.id").read_text().strip()
    marks = {
        "stranger": "",
        "others": OWNER.format(node="other", container="c" * 64),
        "ours": OWNER.format(node=this, container="b" * 64),
    }
    xml = [FOREIGN.format(name=name, metadata=mark) for name, mark in marks.items()]
    subprocess.run([sys.executable, "-c", DEFINE, uri, *xml], check=True, timeout=60)
    subprocess.run(["ip", "netns", "add", "stranger"], check=True)
    # The names are as near to ours as others' can be.
    strangers = [
        Path(f"{node.directory}/state/containers/notes/root.qcow2"),
        Path(f"{node.directory}/state/containers/{'c' * 64}/root.qcow2"),  # the other node's VM names it
        Path(f"{node.directory}/state/images/sha256/readme"),
        Path(f"{node.directory}/state/images/backup/disk.qcow2"),
        Path(f"{node.directory}/state/pods/{'f' * 63}/x.qcow2"),
        Path(f"{node.directory}/state/tapmanager/notes.json"),
        Path(f"{node.directory}/logs/stranger/0.log"),
        Path(f"{node.directory}/state.db"),
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("somebody else's")
    ours = Path(f"{node.directory}/state/containers/{'9' * 64}/root.qcow2")
    ours.parent.mkdir()
    ours.write_text("a leftover of ours")
    definitions = [Path(f"{node.directory}/libvirt/etc/qemu/{name}.xml") for name in ("stranger", "others")]
    try:
        node.up()
        assert not ours.parent.exists(), "recovery removes what is ours"
        assert not os.path.exists(f"{node.directory}/libvirt/etc/qemu/ours.xml")
        node.stop()
        for path in (*strangers, *definitions):
            assert path.exists(), f"recovery: {path}"
        if request.config.getoption("--all"):  # the reconciler acts on nothing before it has seen it for a minute
            node.up()
            ours.parent.mkdir()
            wait_until(lambda: not ours.parent.exists(), 130, "the reconciler removes what is ours")
            for path in (*strangers, *definitions):
                assert path.exists(), f"the reconciler: {path}"
            node.stop()
        done = subprocess.run([*VIRTSHIM, "down", "--dir", node.directory], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for path in strangers:
            assert path.read_text() == "somebody else's", f"virtshim down: {path}"
        assert os.path.exists("/run/netns/stranger")
    finally:
        subprocess.run(["ip", "netns", "del", "stranger"], check=True)
