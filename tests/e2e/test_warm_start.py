"""Guests of pods with virtshim.io/warm-start come from a template that has booted already."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from guest import BOOT, READY, answers, ping
from node import Node
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.outlive]

MEMORY = 128 << 20
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGxvY2FsaG9zdGxvY2FsaG9zdGxvY2FsaG9zdDEy tester"
WARM = {
    "virtshim.io/warm-start": "true",
    "VirtletSSHKeys": KEY,
    "VirtletCloudInitUserData": "write_files:\n- path: /tmp/hello\n  content: |\n    from user-data\n",
}
# The pod's command first prints random numbers, names, and the NIC.
TELL = (
    "head -c 32 /dev/urandom | xxd -p -c 64; cat /proc/sys/kernel/random/uuid /etc/machine-id /sys/class/net/eth0/address; "
    "hostname; echo told; sleep 1000"
)


# Under emulation, and beside other tests, a Debian boots for minutes.
PATIENCE = 900
DEBIAN_USER_DATA = "runcmd:\n- echo ran on $(hostname) >> /var/lib/ran\n"
# Random numbers, the machine, the NIC, the instance.
OF_A_DEBIAN = (
    "head -c 32 /dev/urandom | base64 -w 0; echo; cat /proc/sys/kernel/random/uuid /etc/machine-id; "
    "cat /sys/class/net/e*/address /var/lib/cloud/data/instance-id"
)


class Pods:
    def __init__(
        self, cri: PodClient, node: Node, image: str, memory: int = MEMORY, annotations: Mapping[str, str] = WARM
    ) -> None:
        self.cri, self.node, self.image = cri, node, cri.pull(image)
        self.memory, self.annotations = memory, annotations

    def create(self, name: str, command: tuple[str, ...] = ()) -> tuple[str, str]:
        # A directory of its own: an earlier pod's log would say for it how it has started.
        config = pod_config(name, f"{self.node.directory}/logs/{uuid.uuid4().hex[:8]}", annotations=self.annotations)
        pod = self.cri.run_pod(config)
        wanted = container_config(self.image, self.memory)
        wanted.command.extend(command)
        return pod, self.cri.create(pod, wanted, config)

    def log(self, container: str) -> str:
        return self.cri.status(container).log_path

    def told(self, container: str) -> list[str]:
        wait_for_log(self.log(container), "told", BOOT)
        lines = log_lines(self.log(container))
        return lines[: lines.index("told")]

    def says(self, container: str, script: str) -> str:
        done = self.cri.exec_sync(container, "sh", "-c", script)
        assert done.exit_code == 0, done
        return done.stdout.decode().strip()

    def came_from_template(self, container: str) -> bool:
        return not any("the guest boots" in line for line in log_lines(self.log(container)))

    def make_template(self, patience: float = BOOT) -> None:
        """Such pods boot until the node has a template. It is made even if the first pod is removed."""
        pod, container = self.create("first")
        made = self.node.log().count("template.made")
        self.cri.start(container)
        has_one = self.came_from_template(container)
        self.cri.remove_pod(pod)
        if not has_one:
            wait_until(lambda: self.node.log().count("template.made") > made, patience, "the template is made")

    def start_together(self, *containers: str) -> None:
        threads = [threading.Thread(target=self.cri.start, args=(container,)) for container in containers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def qemu(self, container: str) -> int:
        (file,) = qemus(self.node, container)
        return int(file.read_text())


@pytest.fixture
def pods(cri: PodClient, node: Node, image_url: str) -> Pods:
    made = Pods(cri, node, f"{image_url}/guest.qcow2")
    made.make_template()
    return made


def test_guests_of_one_template_that_start_together_share_no_secret_and_no_name(pods: Pods) -> None:
    made = [pods.create(name, ("/bin/sh", "-c", TELL)) for name in ("one", "two")]
    pods.start_together(*(container for _, container in made))
    told = []
    for (pod, container), name in zip(made, ("one", "two"), strict=True):
        lines = pods.told(container)
        assert pods.came_from_template(container), lines
        assert lines[-1] == name
        assert ping(pods.cri.pod_ip(pod))
        wait_until(
            lambda c=container: pods.says(c, "cat /tmp/hello || :") == "from user-data", 60, "user data ran again"
        )
        assert KEY in pods.says(container, "cat /root/.ssh/authorized_keys")
        own, templates = generation_ids(pods.qemu(container))
        assert own != templates, "the guest's kernel is told that its memory is a copy"
        told.append([*lines, host_key(pods.cri.pod_ip(pod)), str(own)])
    for one, two in zip(*told, strict=True):
        assert one != two
    assert len(told[0]) >= 5


def test_a_qemu_that_its_guest_has_taken_over_cannot_write_to_the_template(pods: Pods) -> None:
    (_, one), (_, two) = (pods.create(name) for name in ("attacker", "victim"))
    for container in (one, two):
        pods.cri.start(container)
        assert pods.came_from_template(container)
    pid = pods.qemu(one)
    files = [
        f"/proc/{pid}/fd/{name}"
        for name in os.listdir(f"/proc/{pid}/fd")
        if "virtshim-template" in os.readlink(f"/proc/{pid}/fd/{name}")
    ]
    assert files
    user = os.stat(f"/proc/{pid}").st_uid
    assert user
    for file in files:
        # As QEMU's user through QEMU's own descriptors, and even as root.
        as_qemu = ["setpriv", f"--reuid={user}", "--clear-groups", "sh", "-c", f"printf poison 1<>{file}"]
        assert subprocess.run(as_qemu, capture_output=True, check=False).returncode != 0
        memory = os.open(file, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(memory, b"poison", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(memory, 4096)
            with pytest.raises(PermissionError):
                mmap.mmap(memory, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(memory)
    maps = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "virtshim-template" in line]
    assert maps
    assert all(line.split()[1] == "rw-p" for line in maps), maps
    assert pods.says(two, "echo unharmed") == "unharmed"


def test_a_guest_from_a_template_reboots_like_any_other(pods: Pods) -> None:
    pod, container = pods.create("rebooting")
    pods.cri.start(container)
    assert pods.came_from_template(container)
    log = pods.log(container)
    wait_for_log(log, READY, BOOT)
    pods.says(container, "(sleep 1; reboot -f) </dev/null >/dev/null 2>&1 &")
    wait_until(lambda: sum(READY in line for line in log_lines(log)) == 2, BOOT, "the guest is up again")
    assert ping(pods.cri.pod_ip(pod))
    assert pods.says(container, "hostname") == "rebooting"


def test_a_killed_virtshim_leaves_no_template_and_the_guests_run_on(pods: Pods) -> None:
    node, cri = pods.node, pods.cri
    pod, container = pods.create("staying")
    cri.start(container)
    assert pods.came_from_template(container)
    boot = pods.says(container, "cat /proc/sys/kernel/random/boot_id")
    killed = node.daemons()["virtshim"]
    os.kill(killed, 9)
    wait_until(lambda: node.daemons().get("virtshim", killed) != killed, 60, "virtshim is started again")
    wait_until(lambda: "virtshim" in node.daemons(), 60, "it serves")

    # Its templates are gone, so the next one boots; while its template boots, virtshim is killed once more.
    with PodClient(node.socket) as again:
        pods.cri = again
        wait_until(lambda: answers(again), 60, "the CRI socket serves")
        assert pods.says(container, "cat /proc/sys/kernel/random/boot_id") == boot
        again.start(pods.create("next")[1])
        wait_until(lambda: templates_of(node), 60, "a template boots")
        killed = node.daemons()["virtshim"]
        os.kill(killed, 9)
        wait_until(lambda: node.daemons().get("virtshim", killed) != killed, 60, "virtshim is started again")
        wait_until(lambda: not templates_of(node), 60, "the template's VM is gone")
        wait_until(lambda: answers(again), 60, "the CRI socket serves")
        wait_until(lambda: not os.listdir(f"{node.directory}/state/templates"), 60, "its files are gone")
        assert again.pod_ip(pod)


@pytest.mark.full
@pytest.mark.guest
@pytest.mark.debian
@pytest.mark.timeout(2 * PATIENCE)
def test_debians_of_one_template_are_machines_of_their_own_and_cloud_init_reads_each_ones_seed(
    cri: PodClient, node: Node, image_url: str
) -> None:
    pods = Pods(
        cri, node, f"{image_url}/debian.qcow2", 512 << 20, WARM | {"VirtletCloudInitUserData": DEBIAN_USER_DATA}
    )
    pods.make_template(PATIENCE)
    made = [pods.create(name) for name in ("blue", "green")]
    pods.start_together(*(container for _, container in made))
    told = []
    for (pod, container), name in zip(made, ("blue", "green"), strict=True):
        assert pods.came_from_template(container), log_lines(pods.log(container))
        finished = cri.exec_sync(
            container, "sh", "-c", "until [ -e /run/cloud-init/result.json ]; do sleep 0.5; done", timeout=PATIENCE
        )
        assert finished.exit_code == 0, finished
        result = json.loads(pods.says(container, "cat /run/cloud-init/result.json"))["v1"]
        assert result["errors"] == []
        assert "NoCloud" in result["datasource"]
        assert pods.says(container, "hostname; cat /etc/hostname /var/lib/ran").split() == [
            name,
            name,
            "ran",
            "on",
            name,
        ]
        assert KEY in pods.says(container, "cat /home/debian/.ssh/authorized_keys")
        address = cri.pod_ip(pod)
        assert address in pods.says(container, "ip -4 -oneline address show scope global")
        assert ping(address)
        own = host_key(address)
        assert own in pods.says(container, "cat /etc/ssh/ssh_host_ed25519_key.pub")
        told.append([*pods.says(container, OF_A_DEBIAN).split(), address, own])
    for one, two in zip(*told, strict=True):
        assert one != two
    assert len(told[0]) == 7


# This test must be the last one, because for some minutes the node does not replace a template that failed.
def test_a_guest_whose_start_from_the_template_fails_boots_in_the_same_call(pods: Pods) -> None:
    pod, container = pods.create("falling")

    def kill_qemu() -> None:
        wait_until(lambda: qemus(pods.node, container), 60, "QEMU starts")
        os.kill(pods.qemu(container), signal.SIGKILL)

    killing = threading.Thread(target=kill_qemu)
    killing.start()
    pods.cri.start(container)
    killing.join()
    wait_for_log(pods.log(container), READY, BOOT)
    assert not pods.came_from_template(container)
    assert ping(pods.cri.pod_ip(pod))
    assert pods.says(container, "hostname") == "falling"


def qemus(node: Node, container: str) -> list[Path]:
    return list(Path(node.directory, "libvirt/run/qemu").glob(f"virtshim-{container[:12]}*.pid"))


def generation_ids(qemu: int) -> tuple[uuid.UUID, uuid.UUID]:
    """The VM generation id that the guest finds in its memory, and the one at the same place of the template's memory."""
    command = Path(f"/proc/{qemu}/cmdline").read_bytes().decode()
    (given,) = re.findall(r'vmgenid[^\0]*?guid"?[:=]"?([0-9a-f-]{36})', command)
    maps = [line for line in Path(f"/proc/{qemu}/maps").read_text().splitlines() if "virtshim-template" in line]
    begin, end = (int(maps[which].split()[0].split("-")[which], 16) for which in (0, -1))
    with (
        open(f"/proc/{qemu}/mem", "rb", buffering=0) as memory,
        open(template_file(qemu), "rb", buffering=0) as template,
    ):
        at = os.pread(memory.fileno(), end - begin, begin).find(uuid.UUID(given).bytes_le)
        assert at >= 0, "the guest does not see the id of its QEMU"
        return uuid.UUID(given), uuid.UUID(bytes_le=os.pread(template.fileno(), 16, at))


def template_file(qemu: int) -> str:
    """The template's memory, by a descriptor of the QEMU."""
    directory = Path(f"/proc/{qemu}/fd")
    return next(str(one) for one in directory.iterdir() if "virtshim-template" in os.readlink(one))


def host_key(address: str) -> str:
    """Of the guest's SSH server."""
    command = ["ssh-keyscan", "-T", "20", "-t", "ed25519", address]
    key = ""

    def is_there() -> bool:
        nonlocal key
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        key = said.split()[-1] if said else ""
        return bool(key)

    wait_until(is_there, 60, "the SSH server answers")
    return key


def templates_of(node: Node) -> list[Path]:
    """VMs of templates."""
    return list(Path(node.directory, "libvirt/run/qemu").glob("virtshim-template-*.pid"))
