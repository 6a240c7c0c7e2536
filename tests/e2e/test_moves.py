"""VMs move to another node while they run."""

from __future__ import annotations

import os

import grpc
import pytest
import uefi_disk
from fakes.background import Background
from fakes.cri import refused
from guest import BOOT, ping
from imageserver import serve_directory
from podclient import container_config, log_lines, pod_config, wait_for_log, wait_until
from test_outlive import COUNTER, DEBIAN_BOOT, ONLINE, Pods
from test_uefi import RESETS

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.outlive]

VM = {"virtshim.io/vm": "traveller"}
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Traveller(Pods):
    def has(self, boot: str) -> bool:
        """Whether the guest runs here."""
        try:
            return self.run("cat", BOOT_ID) == boot
        except grpc.RpcError:
            return False


class Journey:
    """A VM's pod on each of two nodes."""

    def __init__(self, here: Traveller, away: Traveller, annotations: dict[str, str]) -> None:
        self.here, self.away = here, away
        self._annotations = annotations

    def begin(self) -> str:
        """Returns the boot id, once the agent answers."""
        self.here.next(self._annotations)
        self.here.start()
        return self.here.run("cat", BOOT_ID)

    def go(self, boot: str, patience: float = 120) -> None:
        self.away.next({**self._annotations, "virtshim.io/restore-from": "here"})
        self.away.start()
        wait_until(lambda: self.away.has(boot), patience, "the guest runs on the other node")
        assert not self.here.node.qemu_pids()

    def end(self) -> None:
        self.away.end()
        self.here.end()


@pytest.fixture
def journey(cri, node, other_node):
    def make(image: str, annotations: dict[str, str], **options) -> Journey:
        other, client = other_node
        here, away = (
            Traveller(cri, node, image, "traveller", **options),
            Traveller(client, other, image, "traveller", **options),
        )
        return Journey(here, away, {**VM, **annotations})

    return make


def test_a_running_guest_moves_to_another_node_and_back(image_url, journey):
    until = f"{COUNTER.replace('while sleep 1', 'while sleep 1 && [ ! -e /tmp/end ]')}; exit 5"
    trip = journey(f"{image_url}/guest.qcow2", {}, command=("/bin/sh", "-c", until))
    boot = trip.begin()
    here, away = trip.here, trip.away
    wait_for_log(here.log, "count-1", BOOT)
    here.run("sh", "-c", "echo in-memory-only > /tmp/note; echo on-disk > /root/note; sync")
    away.next({**VM, "virtshim.io/restore-from": "here", "virtshim.io/nic-queues": "2"})
    with refused(
        grpc.StatusCode.FAILED_PRECONDITION, "stays on node here. queues: the NIC eth0 has 1, and would have 2 here"
    ):
        away.start()
    away.remove()
    assert here.has(boot)
    trip.go(boot)
    reached = int(log_lines(here.log)[-1].removeprefix("count-"))
    wait_for_log(away.log, f"count-{reached + 2}", 60)
    first = next(int(line.removeprefix("count-")) for line in log_lines(away.log) if line.startswith("count-"))
    assert first == reached + 1, "no output is lost or doubled"
    assert away.run("cat", "/tmp/note", "/root/note") == "in-memory-only\non-disk\n"
    wait_until(lambda: ping(away.cri.pod_status(away.pod).network.ip), 60, "the guest has the new pod's address")
    assert here.cri.status(here.container).state == pb.CONTAINER_RUNNING
    here.cri.stop(here.container, 30)
    status = here.cri.status(here.container)
    assert (status.exit_code, status.reason) == (143, "Moved"), status
    here.remove()

    here.next({**VM, "virtshim.io/restore-from": "there"})
    here.start()
    wait_until(lambda: here.has(boot), 120, "the guest is back")
    assert here.run("cat", "/tmp/note", "/root/note") == "in-memory-only\non-disk\n"
    here.run("touch", "/tmp/end")
    wait_until(lambda: here.cri.status(here.container).state == pb.CONTAINER_EXITED, 60, "the command ends")
    assert here.cri.status(here.container).exit_code == 5
    trip.end()


def test_a_saved_guest_continues_on_another_node(image_url, journey):
    command = ("/bin/sh", "-c", COUNTER)
    trip = journey(f"{image_url}/guest.qcow2", {"virtshim.io/on-stop": "save"}, command=command)
    boot = trip.begin()
    here, away = trip.here, trip.away
    wait_for_log(here.log, "count-1", BOOT)
    here.run("sh", "-c", "echo in-memory-only > /tmp/note; echo on-disk > /root/note; sync")
    here.saved()
    reached = int(log_lines(here.log)[-1].removeprefix("count-"))
    here.remove()
    trip.go(boot)
    wait_for_log(away.log, f"count-{reached + 2}", 60)
    assert away.run("cat", "/tmp/note", "/root/note") == "in-memory-only\non-disk\n"
    wait_until(lambda: ping(away.cri.pod_status(away.pod).network.ip), 60, "the guest has the new pod's address")
    (vm,) = here.disks()
    wait_until(lambda: os.listdir(f"{here.node.directory}/state/vms/{vm}") == ["vm.json"], 30, "only the record stays")
    trip.end()


CPU = b"\x0acpu_common"  # the name of a section in QEMU's stream, after all memory


def no_stream(chunk: bytes) -> bytes:
    return os.urandom(len(chunk))


def no_devices(chunk: bytes) -> bytes:
    memory, name, devices = chunk.partition(CPU)
    return memory + name + os.urandom(len(devices))


def no_more(chunk: bytes) -> bytes | None:
    return None if CPU in chunk else chunk


@pytest.mark.hostile
def test_memory_that_a_taken_over_node_made_up_ends_only_the_qemu_that_reads_it(
    image_url, journey, other_node, peer_nodes
):
    trip = journey(f"{image_url}/guest.qcow2", {})
    boot = trip.begin()
    here, away = trip.here, trip.away
    config = pod_config("neighbour", f"{away.node.directory}/logs/neighbour")
    neighbour = away.cri.run_pod(config)
    away.cri.start(away.cri.create(neighbour, container_config(away.cri.pull(f"{image_url}/null.qcow2")), config))
    running = away.node.qemu_pids()
    assert len(running) == 1
    with peer_nodes.taken_over() as evil:
        away.next({**VM, "virtshim.io/restore-from": "taken-over"})
        for attempt, evil.mangle in enumerate((no_stream, no_devices, no_more)):
            if attempt:
                away.create(attempt)
            away.start()
            wait_until(
                lambda: away.cri.status(away.container).state == pb.CONTAINER_EXITED, 120, "the container has ended"
            )
            status = away.cri.status(away.container)
            assert status.reason == "Error", status
            assert "did not arrive from its other node" in status.message
            wait_until(lambda: away.node.qemu_pids() == running, 30, "only the other VM's QEMU is left")
            wait_until(lambda: here.has(boot), 60, "the guest runs on where it is")
        evil.mangle = bytes
        away.create(3)
        away.start()
        wait_until(lambda: away.has(boot), 120, "it arrives if nothing was changed")
    away.cri.remove_pod(neighbour)
    trip.end()


@pytest.mark.full
def test_uefi_tpm_a_resize_and_plugged_ports_move_along(guest_image, tmp_path, journey):
    uefi_disk.make(guest_image, tmp_path / "uefi.qcow2")
    more = {
        "virtshim.io/firmware": "uefi",
        "virtshim.io/tpm": "true",
        "virtshim.io/max-vcpus": "3",
        "virtshim.io/max-memory": "384Mi",
        "virtshim.io/exec-ports": "2",
    }
    with serve_directory(tmp_path) as url:
        trip = journey(f"{url.removeprefix('http://')}/uefi.qcow2", more, memory=256 << 20)
    boot = trip.begin()
    here = trip.here
    resources = pb.LinuxContainerResources(memory_limit_in_bytes=320 << 20, cpu_quota=200_000, cpu_period=100_000)
    request = pb.UpdateContainerResourcesRequest(container_id=here.container, linux=resources)
    here.cri.runtime.UpdateContainerResources(request, timeout=60)
    at_once = [Background(lambda: here.run("sleep", "3")) for _ in range(3)]  # more than it has ports
    for one in at_once:
        one.done()
    resets, processors = here.run("sh", "-c", RESETS), here.run("sh", "-c", f"{ONLINE}; nproc")
    trip.away.options["memory"] = 320 << 20  # as the pod's template has it by then
    trip.go(boot)
    assert trip.away.run("sh", "-c", RESETS) == resets, "the TPM was not reset"
    assert trip.away.run("nproc") == processors == "2\n"
    trip.end()


@pytest.mark.full
@pytest.mark.debian
@pytest.mark.timeout(2 * DEBIAN_BOOT)
def test_a_busy_debian_moves_with_its_disk_and_gets_the_new_address(image_url, journey):
    once = {"VirtletCloudInitUserData": 'runcmd: ["echo ran >> /var/lib/boots"]\n'}
    trip = journey(f"{image_url}/debian.qcow2", once, memory=512 << 20)
    boot = trip.begin()
    wait = "until [ -e /run/cloud-init/result.json ]; do sleep 0.5; done"
    assert trip.here.cri.exec_sync(trip.here.container, "sh", "-c", wait, timeout=DEBIAN_BOOT).exit_code == 0
    write = "dd if=/dev/urandom of=/var/tmp/busy bs=1M count=4 conv=fsync; sleep 0.2"
    busy = f"(while :; do {write}; done) >/dev/null 2>&1 </dev/null &"
    trip.here.run("sh", "-c", busy)
    trip.go(boot, 600)
    assert trip.away.run("cat", "/var/lib/boots") == "ran\n"
    wait_until(
        lambda: ping(trip.away.cri.pod_status(trip.away.pod).network.ip), 120, "Debian has the new pod's address"
    )
    assert trip.away.run("sh", "-c", "cmp /var/tmp/busy /var/tmp/busy && dmesg | grep -c 'I/O error' || true") == "0\n"
    trip.end()
