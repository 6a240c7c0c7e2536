"""On the system's libvirt, configured as Debian installs it, each VM has its own user, mounts and limits. It keeps them
when daemons restart, and leaves nothing. tests/hostile/qemu tests what a taken-over QEMU can reach there."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest import BOOT, READY
from hugepages import number, reserved
from imageserver import serve_directory
from leaks import Snapshot
from libvirtd_node import LibvirtdNode
from own_libvirtd import missing
from podclient import container_config, log_lines, pod_config, wait_for_log, wait_until
from work import Work

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.timeout(600)]

# 128 MiB.
PAGES = 64
# Lines of eight bytes, which are twice as much as a raw log holds.
LINES = 17_000
PLACES = ("/etc/libvirt", "/run/libvirt", "/var/lib/libvirt", "/var/log/libvirt")
# Files that belong to the daemon itself, from its start or from the first VM on.
LIBVIRTS_OWN = re.compile(r"/(libvirtd|driver|qemu/autostarted|virtlogd)[^/]*$|^/etc/libvirt/qemu$|/log/libvirt/qemu$")


class OlderNode(LibvirtdNode):
    """A node with a pod of a version whose VMs shared one user, which owns the pod's disk."""

    older: Work
    older_pids: frozenset[int]

    def start_older(self) -> None:
        before = self.qemu_pids()
        with self.client() as cri:
            self.older = Work(self, cri, f"{self.image_url}/null.qcow2")
            self.older.config.annotations["virtshim.io/root-disk"] = "pod"
            for step in (self.older.pull, self.older.run, self.older.create, self.older.start):
                step()
        self.older_pids = frozenset(self.qemu_pids() - before)


class Guest:
    """A booted VM."""

    def __init__(self, node: LibvirtdNode, pod: str, container: str, pid: int) -> None:
        self.node, self.pod, self.container, self.pid = node, pod, container, pid
        self.files = Path(node.directory, "state/containers", container)

    def status(self) -> dict[str, str]:
        """A field of the process's status."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {name: " ".join(rest.split()) for name, _, rest in (line.partition(":") for line in lines)}

    @property
    def uid(self) -> int:
        return int(self.status()["Uid"].split()[0])

    def libvirts_own(self) -> Path:
        """The directory of its monitor's socket."""
        state = Path(self.node.libvirtd.root, "var/lib/libvirt/qemu")
        return next(state.glob(f"domain-*-virtshim-{self.container[:11]}"))

    def says(self, *command: str) -> bytes:
        with self.node.client() as cri:
            request = pb.ExecSyncRequest(container_id=self.container, cmd=command, timeout=60)
            return bytes(cri.runtime.ExecSync(request, timeout=90).stdout)


@pytest.fixture(scope="module")
def node(guest_image: Path) -> Iterator[OlderNode]:
    """The node, whose first VM dates from before VMs had their own users."""
    if why := missing():
        pytest.skip(why)
    before = Snapshot.take()
    directory = tempfile.mkdtemp(prefix="virtshim-system-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    with serve_directory(guest_image.parent) as url:
        node = OlderNode(f"{directory}/n", url.removeprefix("http://"), settings="vm_uids = 0\n")
        try:
            node.up()
            node.start_older()
            config = Path(node.directory, "config.toml")
            config.write_text(config.read_text().replace("vm_uids = 0\n", ""))
            node.restart("virtshim")
            yield node
        finally:
            node.end()
    shutil.rmtree(directory)
    left = before.settled(seconds=10)
    assert not left, "left behind: " + "; ".join(left)


@pytest.fixture(scope="module")
def guest(node: LibvirtdNode) -> Iterator[Guest]:
    """A booted VM with its own user."""
    with node.client() as cri:
        config = pod_config("jailed", f"{node.directory}/logs/jailed")
        before = node.qemu_pids()
        pod = cri.run_pod(config)
        container = cri.create(pod, container_config(cri.pull(f"{node.image_url}/guest.qcow2")), config)
        cri.start(container)
        wait_for_log(cri.status(container).log_path, READY, BOOT)
        (pid,) = node.qemu_pids() - before
        yield Guest(node, pod, container, pid)
        cri.remove_pod(pod)


def rights(path: Path) -> tuple[int, str]:
    found = path.lstat()
    return found.st_uid, stat.filemode(found.st_mode)


def test_a_vms_process_has_its_own_user_and_minimal_rights(guest: Guest) -> None:
    status = guest.status()
    kvm = grp.getgrnam("kvm").gr_gid
    first = guest.node.settings.libvirt.first_vm_uid
    assert set(status["Uid"].split()) == {str(guest.uid)}
    assert guest.uid in range(first, first + 65_536)
    assert {*status["Gid"].split(), *status["Groups"].split()} == {str(kvm)}
    assert (status["NoNewPrivs"], status["Seccomp"], int(status["CapEff"], 16)) == ("1", "2", 0)
    assert int(status["Seccomp_filters"]) >= 2, "libvirt's, and vmwrapper's"
    limits = Path(f"/proc/{guest.pid}/limits").read_text()
    assert re.search(r"^Max core file size +[01] +[01] ", limits, re.MULTILINE)
    assert re.search(r"^Max processes +1024 +1024 ", limits, re.MULTILINE)
    assert int(Path(f"/proc/{guest.pid}/coredump_filter").read_text(), 16) == 0
    assert not Path(f"/proc/{guest.pid}/root/dev/vda").exists(), "libvirt gives each QEMU a /dev of its own"
    assert f"/virtshim-{guest.container}" in Path(f"/proc/{guest.pid}/cgroup").read_text()


def test_a_vms_files_belong_to_its_user_and_files_that_root_opens_to_root(guest: Guest) -> None:
    assert rights(guest.files / "root.qcow2") == (guest.uid, "-rw-------")
    assert rights(guest.files / "seed.iso") == (guest.uid, "-r--------")
    assert rights(guest.files / "console.log") == (0, "-rw-------"), "virtlogd writes it"
    assert rights(guest.files)[0] == 0
    assert rights(guest.libvirts_own()) == (0, "drwxr-x---")
    assert rights(guest.libvirts_own() / "monitor.sock")[0] == 0
    assert rights(guest.libvirts_own() / "master-key.aes") == (guest.uid, "-rw-------")


@pytest.mark.parametrize("daemon", ["virtshim", "libvirtd"])
def test_a_vm_keeps_running_and_takes_commands_after_a_daemon_is_killed(guest: Guest, daemon: str) -> None:
    before = guest.says("cat", "/proc/sys/kernel/random/boot_id")
    os.chown(guest.libvirts_own(), guest.uid, -1)  # as it is if virtshim is killed in the middle of the start
    guest.node.restart(daemon)
    assert guest.says("cat", "/proc/sys/kernel/random/boot_id") == before
    # virtshim takes it back once it has reached libvirt again, and commands do not wait for that.
    wait_until(lambda: rights(guest.libvirts_own()) == (0, "drwxr-x---"), 30, "root has the directory again")
    assert rights(guest.files / "root.qcow2")[0] == guest.uid


def test_a_console_log_is_complete_if_its_raw_log_is_rotated(guest: Guest) -> None:
    """virtlogd rotates the log, in these tests each 64 KiB."""
    with guest.node.client() as cri:
        log = cri.status(guest.container).log_path
    guest.says("sh", "-c", f"dmesg -n 1; (echo; seq 100001 {100000 + LINES}) > /dev/console")
    wait_for_log(log, str(100000 + LINES), 60)
    said = [int(line) for line in log_lines(log) if re.fullmatch(r"1\d{5}", line)]
    assert sorted(set(range(100001, 100001 + LINES)) - set(said)) == []
    assert len(said) == LINES
    assert said == sorted(said)
    assert (guest.files / "console.log.0").exists()


def test_a_stopped_and_removed_vm_leaves_nothing(node: LibvirtdNode) -> None:
    before = files(node)
    with node.client() as cri:
        work = Work(node, cri, f"{node.image_url}/null.qcow2")
        for step in (work.pull, work.run, work.create, work.start):
            step()
        assert {path for path in files(node) - before if path.startswith("/var/log/libvirt/qemu/")}
        disk = Path(node.directory, "state/containers", work.container, "root.qcow2")
        assert [note for note in os.listxattr(disk) if "libvirt" in note] == [], "libvirt never owned it"
        work.stop()
        work.remove_pod()
    wait_until(lambda: files(node) <= before, 15, "all is gone")
    assert list(Path("/sys/fs/cgroup").rglob(f"*{work.container}*")) == []


def files(node: LibvirtdNode) -> set[str]:
    """The files, links and processes of the node and of libvirt."""
    root = node.libvirtd.root
    found = {str(path).removeprefix(root) for place in PLACES for path in Path(root + place).rglob("*")}
    return node.left() | {path for path in found if not LIBVIRTS_OWN.search(path)}


def test_a_jailed_vm_uses_huge_pages_and_returns_them(node: LibvirtdNode) -> None:
    with reserved(PAGES), node.client() as cri:
        free, before = number("free_hugepages"), node.qemu_pids()
        config = pod_config("huge", f"{node.directory}/logs/huge")
        wanted = container_config(cri.pull(f"{node.image_url}/null.qcow2"))
        wanted.linux.resources.hugepage_limits.add(page_size="2MB", limit=PAGES << 21)
        pod = cri.run_pod(config)
        container = cri.create(pod, wanted, config)
        cri.start(container)
        (pid,) = node.qemu_pids() - before
        assert os.stat(f"/proc/{pid}").st_uid >= node.settings.libvirt.first_vm_uid
        assert number("free_hugepages") == free - PAGES
        (of_vm,) = Path(f"{node.libvirtd.root}/dev/hugepages/libvirt/qemu").glob(f"*virtshim-{container[:11]}*")
        assert rights(of_vm) == (os.stat(f"/proc/{pid}").st_uid, "drwx------")
        cri.remove_pod(pod)
        assert not of_vm.exists()
        assert number("free_hugepages") == free


@pytest.mark.full
@pytest.mark.volumes
def test_virtiofsd_writes_into_the_huge_pages_of_a_vm_with_volumes(node: LibvirtdNode) -> None:
    Path(node.volume, "text").write_text("here")
    with reserved(PAGES), node.client() as cri:
        free = number("free_hugepages")
        config = pod_config("huge-shared", f"{node.directory}/logs/huge-shared")
        wanted = container_config(cri.pull(f"{node.image_url}/guest.qcow2"))
        wanted.linux.resources.hugepage_limits.add(page_size="2MB", limit=PAGES << 21)
        wanted.mounts.add(container_path="/data", host_path=node.volume)
        pod = cri.run_pod(config)
        container = cri.create(pod, wanted, config)
        cri.start(container)
        wait_until(lambda: cri.exec_sync(container, "cat", "/data/text").stdout == b"here", BOOT, "it has its volume")
        assert number("free_hugepages") == free - PAGES
        cri.remove_pod(pod)
        assert number("free_hugepages") == free


def test_the_next_vm_of_a_pod_of_an_earlier_version_has_its_own_user(
    node: OlderNode,
) -> None:
    """The next VM uses the same disk, which the shared user owned."""
    common = pwd.getpwnam("libvirt-qemu").pw_uid
    disks = Path(node.directory, "state/pods")
    with node.client() as cri:
        work = node.older
        work.cri = cri
        assert cri.status(work.container).state == pb.CONTAINER_RUNNING
        assert {os.stat(f"/proc/{pid}").st_uid for pid in node.older_pids} == {common}
        assert {path.stat().st_uid for path in disks.rglob("*.qcow2")} == {common}
        work.stop()
        before = node.qemu_pids()
        work.attempt += 1
        work.create()
        work.start()
        (pid,) = node.qemu_pids() - before
        own = os.stat(f"/proc/{pid}").st_uid
        assert own >= node.settings.libvirt.first_vm_uid
        assert {path.stat().st_uid for path in disks.rglob("*.qcow2")} == {own}
        work.remove_pod()
        assert list(disks.rglob("*.qcow2")) == []
