"""The statistics of a real VM follow its activity."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fakes.metrics import one, scraped
from podclient import PodClient, wait_until
from running_vm import MEMORY, Vm

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.config.settings import load_settings
from virtshim.preflight.node_facts import qemus
from virtshim.store.read_only import read_running

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

MIB = 1 << 20
# The boot of the small guest touches at least this much memory.
TOUCHED = 32 * MIB
# These metrics need a cgroup of the VM's own, or a kernel with that accounting.
CGROUP_ONLY = ("container_memory_cache", "container_memory_kernel_usage", "container_pressure_", "container_hugetlb_")
# These metrics need a request that sets them.
SPEC = ("container_spec_cpu_",)


def stats(cri: PodClient, container: str) -> pb.ContainerStats:
    (found,) = cri.runtime.ListContainerStats(
        pb.ListContainerStatsRequest(filter=pb.ContainerStatsFilter(id=container)), timeout=20
    ).stats
    return found


def pod_stats(cri: PodClient, pod: str) -> pb.PodSandboxStats:
    return cri.runtime.PodSandboxStats(pb.PodSandboxStatsRequest(pod_sandbox_id=pod), timeout=20).stats


def samples(cri: PodClient) -> dict[str, list[pb.Metric]]:
    (pod,) = cri.runtime.ListPodSandboxMetrics(pb.ListPodSandboxMetricsRequest(), timeout=20).pod_metrics
    found: dict[str, list[pb.Metric]] = {}
    for metric in [*pod.metrics, *(m for c in pod.container_metrics for m in c.metrics)]:
        found.setdefault(metric.name, []).append(metric)
    return found


def test_the_statistics_of_a_vm_follow_its_activity(vm: Vm):
    cri, node, pod, container = vm.cri, vm.node, vm.pod, vm.container

    first = stats(cri, container)
    second = stats(cri, container)
    assert first.cpu.timestamp < second.cpu.timestamp
    boot_cost = first.cpu.usage_core_nano_seconds.value
    assert 500_000_000 < boot_cost <= second.cpu.usage_core_nano_seconds.value

    # The guest's touched RAM and QEMU's own memory, never more than both.
    assert TOUCHED < first.memory.working_set_bytes.value < MEMORY + 256 * MIB
    assert first.memory.working_set_bytes.value <= first.memory.usage_bytes.value
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{vm.qemu}/status").read_text().splitlines())
    anonymous = int(fields["RssAnon"].split()[0]) << 10
    assert abs(first.memory.rss_bytes.value - anonymous) < 32 * MIB

    # `virtshim check` measures QEMU's program, heap and translated code, without the guest's memory.
    ((_, container_record),) = read_running(f"{node.directory}/state/state.db")
    assert container_record.id.value == container
    (measured,), trouble = qemus(load_settings(f"{node.directory}/config.toml"))
    assert (trouble, measured.declared) == ("", 0)
    assert measured.taken is not None
    assert 16 * MIB < measured.taken < 256 * MIB
    resident = sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem"))
    assert TOUCHED < resident - measured.taken < MEMORY + 32 * MIB

    vm.says("i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done")
    busy = stats(cri, container)
    assert busy.cpu.usage_core_nano_seconds.value - boot_cost > 200_000_000
    assert busy.cpu.usage_nano_cores.value > 50_000_000

    before = pod_stats(cri, pod).linux.network.default_interface
    assert before.name == "eth0"
    ping = ["ping", "-c", "20", "-i", "0.05", "-s", "1000", "-w", "30", vm.address]
    assert subprocess.run(ping, capture_output=True, check=False).returncode == 0
    after = pod_stats(cri, pod).linux.network.default_interface
    for name in ("rx_bytes", "tx_bytes"):
        grown = getattr(after, name).value - getattr(before, name).value
        assert 20_000 < grown < 60_000, name

    disk = stats(cri, container).writable_layer
    assert disk.fs_id.mountpoint == f"{node.directory}/state/containers"
    vm.says("dd if=/dev/urandom of=/dev/vda bs=1M count=12 conv=fsync")
    written = stats(cri, container).writable_layer
    assert 12 * MIB <= written.used_bytes.value - disk.used_bytes.value < 40 * MIB
    assert written.inodes_used.value >= 3

    described = cri.runtime.ListMetricDescriptors(pb.ListMetricDescriptorsRequest(), timeout=20).descriptors
    keys = {one.name: len(one.label_keys) for one in described}
    # The balloon driver reports every 10 s.
    wait_until(lambda: "virtshim_vmi_memory_unused_bytes" in samples(cri), 60, "the guest reports its memory")
    found = samples(cri)
    assert {name for name in keys if name not in found and not name.startswith((*CGROUP_ONLY, *SPEC))} == set()
    assert all(len(m.label_values) == keys[name] for name, every in found.items() for m in every)
    (unused,) = found["virtshim_vmi_memory_unused_bytes"]
    assert MIB < unused.value.value < MEMORY
    writes = {m.label_values[-1]: m.value.value for m in found["container_fs_writes_bytes_total"]}
    assert max(writes.values()) >= 12 * MIB
    assert found["container_processes"][0].value.value == 1

    # The same numbers as Prometheus reads them.
    text = scraped(f"{node.directory}/run/metrics.sock")
    about = {"id": container}
    assert one(text, "virtshim_vmi_cpu_usage_seconds_total", **about) > 0.7
    assert MIB < one(text, "virtshim_vmi_memory_unused_bytes", **about) < MEMORY
    assert {one(text, "virtshim_up", part=part) for part in ("libvirt", "network", "database")} == {1.0}


def test_a_start_is_counted_and_an_ended_vm_uses_no_cpu_and_less_disk(vm: Vm, null_image: Path, image_url: str):
    with vm.beside("ended", f"{image_url}/{null_image.name}") as container:
        vm.cri.start(container)
        text = scraped(f"{vm.node.directory}/run/metrics.sock")
        assert one(text, "virtshim_cni_duration_seconds_count", command="ADD", plugin="bridge") >= 1
        assert one(text, "virtshim_start_phase_duration_seconds_count", phase="libvirt", result="ok") >= 1
        running = stats(vm.cri, container)
        assert running.cpu.usage_core_nano_seconds.value > 0
        vm.cri.stop(container, 0)
        ended = stats(vm.cri, container)
        assert not ended.HasField("cpu")
        assert 0 < ended.writable_layer.used_bytes.value < running.writable_layer.used_bytes.value
