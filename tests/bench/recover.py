"""Measures the restart of virtshim with very many pods, and its memory with them.

Daemons, records, container directories, pod networks (namespace, CNI, bridge, tap, DHCP) and libvirtd are real. libvirtd
serves its test driver, which has a running domain with our mark for each pod and no QEMU behind it, because 200 QEMUs do
not fit on a bench."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from figures import Figures, timed
from node import free_cidr
from own_libvirtd import OwnLibvirtd
from podclient import PodClient

from virtshim.cli.daemons import Daemon
from virtshim.cli.node_dir import NodeDir, NodeOptions, write_node
from virtshim.config.settings import Settings
from virtshim.model.container import Container, ContainerConfig, ContainerName, ContainerSpec
from virtshim.model.ids import ContainerId, ImageDigest, ImageId, SandboxId
from virtshim.model.image import DiskFormat, Image
from virtshim.model.layout import record_copy
from virtshim.model.network import Dns
from virtshim.model.sandbox import PodKey, Sandbox, SandboxConfig
from virtshim.model.vm import Disk, DiskBus, VmSize, VmSpec
from virtshim.pods.networks import PodNetworkClient
from virtshim.pods.ports import AttachRequest
from virtshim.pods.tapmanager_connection import TapmanagerConnection
from virtshim.store.records import SqliteRecords
from virtshim.system import process
from virtshim.vm import domain_xml
from virtshim.vm.elements.processors import Cgroups, DomainType

PODS = 200
_IMAGE = ImageDigest(f"sha256:{hashlib.sha256(b'').hexdigest()}")
_LIMIT = 60.0


class ManyPods:
    """A node's daemons and the pods that they find when they start."""

    def __init__(self, directory: str, sockets: str) -> None:
        """`sockets`: the directory of libvirtd's sockets."""
        self._node = NodeDir.at(f"{directory}/n")
        self._domains = f"{directory}/domains.xml"
        overlay = Path(f"{directory}/overlay.toml")
        overlay.write_text(
            f'[libvirt]\nuri = "test+unix://{self._domains}?socket={sockets}/libvirt-sock"\n[log]\nlevel = "error"\n'
        )
        options = NodeOptions(self._node.path, config=str(overlay), domain_type="qemu", pod_cidr=free_cidr())
        self.settings: Settings = write_node(self._node, options)
        self._layout = self.settings.layout()
        self._networks = PodNetworkClient(TapmanagerConnection(self.settings.tapmanager.socket))
        arguments = ("--config", self._node.config_file)
        self.tapmanager = Daemon("tapmanager", (sys.executable, "-m", "tapmanager", *arguments, "--log-level", "error"))
        self.shares = Daemon("virtshim-shares", (sys.executable, "-m", "tapmanager.shares", *arguments))
        self.virtshim = Daemon("virtshim", (sys.executable, "-m", "virtshim", "serve", *arguments))
        self._pods: list[SandboxId] = []
        self._write_domains([])

    def fill(self, pods: int) -> None:
        """Creates pods through the services, without the VMs."""
        records = SqliteRecords(self._layout.database)
        node = records.node_id()
        records.set_node_fact("boot", Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        image = Path(f"{self._layout.images}/sha256/{_IMAGE.hex}")
        image.parent.mkdir(parents=True, exist_ok=True)
        image.touch()
        records.images.put(Image(ImageId(_IMAGE.value), _IMAGE, ("registry.test/vm:1",), (), 1, 1, DiskFormat.RAW, 1))
        profile = domain_xml.NodeProfile(node, DomainType.TEST, "/usr/bin/qemu", "/usr/bin/qemu", Cgroups.OFF)
        domains = []
        for number in range(pods):
            sandbox, container = self._records_of(number)
            records.sandboxes.add(sandbox)
            records.containers.add(container)
            console = Path(self._layout.console_log(container.id))
            console.parent.mkdir(parents=True)
            console.write_text(f"console of pod {number}\n" * 50)
            Path(record_copy(self._layout, container.id)).write_text(records.to_text(sandbox, container))
            domains.append(domain_xml.build(self._spec(sandbox, container), profile))
        records.close()
        self._write_domains(domains)

    def empty(self) -> None:
        for sandbox in self._pods:
            self._networks.release(sandbox, _LIMIT)
        process.run(["ip", "link", "delete", self._node.bridge], timeout=10)  # which the CNI plugin leaves

    def _write_domains(self, domains: list[str]) -> None:
        Path(self._domains).write_text(f"<node>{''.join(domains)}</node>")

    def _records_of(self, number: int) -> tuple[Sandbox, Container]:
        sandbox_id = SandboxId(hashlib.sha256(f"pod {number}".encode()).hexdigest())
        own = ContainerId(hashlib.sha256(f"container {number}".encode()).hexdigest())
        key = PodKey("default", f"web-{number}", str(uuid.uuid5(uuid.NAMESPACE_DNS, str(number))), 0)
        labels = {
            "app": f"web-{number % 20}",
            "pod-template-hash": f"{number:010x}",
            "io.kubernetes.pod.name": key.name,
            "io.kubernetes.pod.namespace": key.namespace,
            "io.kubernetes.pod.uid": key.uid,
        }
        dns = Dns(("10.96.0.10",), ("default.svc.cluster.local",), ("ndots:5",))
        self._pods.append(sandbox_id)
        network = self._networks.attach(AttachRequest(sandbox_id, key, dns), _LIMIT)
        logs = f"{self._node.path}/logs/{key.name}"
        config = SandboxConfig(hostname=key.name, log_directory=logs, dns=dns, labels=labels)
        sandbox = Sandbox(sandbox_id, key, config, created_at=2 * number + 1).ready(network)
        container = Container(
            ContainerSpec(
                id=own,
                sandbox_id=sandbox_id,
                name=ContainerName("vm", 0),
                config=ContainerConfig("registry.test/vm:1", labels=labels, log_path="vm/0.log"),
                image=_IMAGE,
                image_id=ImageId(_IMAGE.value),
                image_ref=_IMAGE.value,
                domain_uuid=str(own.domain_uuid()),
                created_at=2 * number + 2,
                log_file=f"{logs}/vm/0.log",
            ),
        )
        return sandbox, container.created().running(2 * number + 2)

    def _spec(self, sandbox: Sandbox, container: Container) -> VmSpec:
        return VmSpec(
            uuid=container.domain_uuid,
            name=f"virtshim-{container.id.value[:12]}-vm",
            container_id=container.id,
            sandbox_id=sandbox.id,
            size=VmSize(vcpus=1, memory_bytes=64 << 20),
            disk_bus=DiskBus.VIRTIO,
            disks=(Disk(self._layout.root_disk(container.id), DiskFormat.QCOW2, "root"),),
            console_socket=self._layout.console_socket(container.id),
            console_log=self._layout.console_log(container.id),
            agent_socket=self._layout.agent_socket(container.id),
        )


def resident(daemon: Daemon) -> float:
    """MiB."""
    assert daemon.process is not None
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]) / 1024


def processor_time(daemon: Daemon) -> float:
    """The process's CPU seconds since its start, which other load on the machine does not affect."""
    assert daemon.process is not None
    words = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def memory(node: ManyPods, pods: int) -> dict[str, float]:
    """MiB of each daemon after kubelet has polled virtshim for a while."""
    with PodClient(node.settings.cri_socket) as cri:
        for _ in range(20):
            assert (len(cri.pods()), len(cri.containers())) == (pods, pods)
    return {daemon.name: resident(daemon) for daemon in (node.virtshim, node.tapmanager, node.shares)}


@contextlib.contextmanager
def running(*daemons: Daemon) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for daemon in daemons:
            stack.callback(daemon.stop)
            daemon.start()
        yield


@contextlib.contextmanager
def own_libvirtd(directory: str) -> Iterator[str]:
    """Starts a libvirtd; returns the directory of its sockets."""
    libvirtd = OwnLibvirtd(directory)
    try:
        libvirtd.start()
        yield directory
    finally:
        libvirtd.end()


def recover_rounds(rounds: int, figures: Figures) -> None:
    with tempfile.TemporaryDirectory(prefix="vs-many-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o711)
        with own_libvirtd(directory) as sockets:
            node = ManyPods(directory, sockets)
            with running(node.tapmanager, node.shares):
                _rounds(node, rounds, figures)


def _rounds(node: ManyPods, rounds: int, figures: Figures) -> None:
    with running(node.virtshim):
        bare = sum(memory(node, 0).values())
    node.fill(PODS)
    try:
        for _ in range(rounds):
            figures.add("recover_200_s", timed(node.virtshim.start) / 1000, "s")
            figures.add("phase_recover_cpu_s", processor_time(node.virtshim), "s")
            of_each = memory(node, PODS)
            every = sum(of_each.values())
            figures.add("rss_200_mib", every, "MiB")
            figures.add("rss_per_pod_kib", (every - bare) * 1024 / PODS, "KiB")
            for name, mib in of_each.items():
                figures.add(f"rss_{name.removeprefix('virtshim-')}_200_mib", mib, "MiB")
            node.virtshim.stop()
    finally:
        node.virtshim.stop()
        node.empty()


def main() -> None:
    """Measures these figures alone."""
    figures = Figures()
    recover_rounds(5, figures)
    for key, figure in figures.document().items():
        print(key, figure)


if __name__ == "__main__":
    main()
