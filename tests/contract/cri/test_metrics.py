"""kubelet and critest can read the metrics: each is described, with as many label values as keys."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any

import pytest
from fakes.cri import Client
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.usage import CgroupUsage, DomainUsage, HugepageUsage, Pressure

pytestmark = pytest.mark.cri

# The metrics that critest requires to be described and, except the last two groups, sampled for a running container.
ALWAYS = [
    "container_cpu_cfs_periods_total",
    "container_cpu_cfs_throttled_periods_total",
    "container_cpu_cfs_throttled_seconds_total",
    "container_cpu_system_seconds_total",
    "container_cpu_usage_seconds_total",
    "container_cpu_user_seconds_total",
    "container_file_descriptors",
    "container_fs_inodes_free",
    "container_fs_inodes_total",
    "container_fs_limit_bytes",
    "container_fs_usage_bytes",
    "container_last_seen",
    "container_memory_cache",
    "container_memory_failcnt",
    "container_memory_failures_total",
    "container_memory_kernel_usage",
    "container_memory_mapped_file",
    "container_memory_max_usage_bytes",
    "container_memory_rss",
    "container_memory_swap",
    "container_memory_usage_bytes",
    "container_memory_working_set_bytes",
    "container_network_receive_bytes_total",
    "container_network_receive_errors_total",
    "container_network_receive_packets_dropped_total",
    "container_network_receive_packets_total",
    "container_network_transmit_bytes_total",
    "container_network_transmit_errors_total",
    "container_network_transmit_packets_dropped_total",
    "container_network_transmit_packets_total",
    "container_oom_events_total",
    "container_processes",
    "container_sockets",
    "container_spec_cpu_period",
    "container_spec_cpu_shares",
    "container_spec_memory_limit_bytes",
    "container_spec_memory_swap_limit_bytes",
    "container_start_time_seconds",
    "container_threads",
    "container_threads_max",
]
BLOCK = [
    "container_blkio_device_usage_total",
    "container_fs_reads_bytes_total",
    "container_fs_reads_total",
    "container_fs_writes_bytes_total",
    "container_fs_writes_total",
]
MAY_MISS = [
    "container_hugetlb_max_usage_bytes",
    "container_hugetlb_usage_bytes",
    "container_pressure_cpu_stalled_seconds_total",
    "container_pressure_cpu_waiting_seconds_total",
    "container_pressure_io_stalled_seconds_total",
    "container_pressure_io_waiting_seconds_total",
    "container_pressure_memory_stalled_seconds_total",
    "container_pressure_memory_waiting_seconds_total",
    "container_spec_cpu_quota",
    "container_spec_memory_reservation_limit_bytes",
    "container_ulimits_soft",
]
BASE = ["container", "id", "image", "name", "namespace", "pod"]

PRESSURE = Pressure(5_000_000_000, (1.0, 0.5, 0.0), 2_000_000_000, (0.0, 0.0, 0.0))
CGROUP = CgroupUsage(
    memory=200,
    inactive_file=10,
    anon=150,
    shmem=0,
    file=40,
    mapped_file=5,
    limit=512,
    kernel=7,
    swap=0,
    peak_memory=250,
    limit_hits=3,
    oom_kills=1,
    cpu_periods=9,
    cpu_throttled_periods=4,
    cpu_throttled=2_500_000_000,
    max_tasks=64,
    pressure={"cpu": PRESSURE, "memory": PRESSURE, "io": PRESSURE},
    hugepages=(HugepageUsage("2MB", 4, 6),),
)
RESOURCES = pb.LinuxContainerResources(
    cpu_period=100_000,
    cpu_quota=20_000,
    cpu_shares=1024,
    memory_limit_in_bytes=64 << 20,
    memory_swap_limit_in_bytes=64 << 20,
)


def descriptors(client: Client) -> dict[str, pb.MetricDescriptor]:
    found = client.ListMetricDescriptors(pb.ListMetricDescriptorsRequest()).descriptors
    by_name = {one.name: one for one in found}
    assert len(by_name) == len(found), "a name is described twice"
    return by_name


def metrics(client: Client) -> list[pb.PodSandboxMetrics]:
    return list(client.ListPodSandboxMetrics(pb.ListPodSandboxMetricsRequest()).pod_metrics)


def flat(pods: list[pb.PodSandboxMetrics]) -> list[pb.Metric]:
    return [
        *(m for one in pods for m in one.metrics),
        *(m for one in pods for c in one.container_metrics for m in c.metrics),
    ]


def values(client: Client, name: str) -> dict[tuple[str, ...], int]:
    """The samples by those label values that differ between objects."""
    return {tuple(m.label_values[len(BASE) :]): m.value.value for m in flat(metrics(client)) if m.name == name}


@pytest.fixture
def in_cgroup(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each VM has a cgroup of its own."""
    readings = world.outside.readings
    real = readings.usage

    def usage(wanted: Mapping[uuid.UUID, str]) -> Mapping[uuid.UUID, DomainUsage]:
        return {domain: dataclasses.replace(found, cgroup=CGROUP) for domain, found in real(wanted).items()}

    monkeypatch.setattr(readings, "usage", usage)


def start(client: Client, **changes: Any) -> tuple[str, str]:
    sandbox = client.run()
    made = client.create(sandbox, linux=pb.LinuxContainerConfig(resources=RESOURCES), **changes)
    client.start(made)
    return sandbox, made


def test_every_metric_critest_knows_is_described_with_help_and_labels(client: Client) -> None:
    found = descriptors(client)
    assert len({*ALWAYS, *BLOCK, *MAY_MISS}) == 56
    assert {*ALWAYS, *BLOCK, *MAY_MISS} <= set(found)
    for name, one in found.items():
        assert one.help.endswith("."), name
        assert list(one.label_keys[: len(BASE)]) == BASE, name
        assert len(set(one.label_keys)) == len(one.label_keys), name


def test_a_running_vm_in_a_cgroup_has_a_sample_of_every_metric(client: Client, in_cgroup: None) -> None:
    start(client)
    assert {one.name for one in flat(metrics(client))} == set(descriptors(client))


def test_a_vm_without_a_cgroup_lacks_only_the_samples_of_cgroups(client: Client) -> None:
    start(client)
    missing = set(descriptors(client)) - {one.name for one in flat(metrics(client))}
    assert missing == {"container_memory_cache", "container_memory_kernel_usage"} | {
        name for name in MAY_MISS if "pressure" in name or "hugetlb" in name
    }
    assert values(client, "container_oom_events_total") == {(): 0}
    assert values(client, "container_cpu_cfs_periods_total") == {(): 0}


def test_every_sample_is_described_and_has_a_value_for_each_label(client: Client, in_cgroup: None) -> None:
    start(client)
    client.running("other")
    known = descriptors(client)
    found = flat(metrics(client))
    assert len(found) > 2 * len(known) - 10
    for one in found:
        assert len(one.label_values) == len(known[one.name].label_keys), one.name
        assert one.HasField("value"), one.name
    assert len({(one.name, *one.label_values) for one in found}) == len(found), "Prometheus refuses a series told twice"


def test_labels_name_the_pod_the_container_and_the_vm(client: Client, world: World) -> None:
    sandbox, made = start(client)
    (one,) = metrics(client)
    assert one.pod_sandbox_id == sandbox
    (container,) = one.container_metrics
    assert container.container_id == made
    by_name = {metric.name: list(metric.label_values) for metric in container.metrics}
    image = world.records.containers.all()[0].config.user_image
    assert by_name["container_memory_rss"] == ["vm", made, image, f"virtshim-{made[:12]}-vm", "default", "web"]
    assert by_name["container_cpu_usage_seconds_total"][-1] == "total"
    pod = {metric.name: list(metric.label_values) for metric in one.metrics}
    assert pod["container_network_receive_bytes_total"] == ["", sandbox, "", "", "default", "web", "eth0"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("container_network_receive_bytes_total", {("eth0",): 1000}),
        ("container_network_transmit_packets_dropped_total", {("eth0",): 4}),
        ("virtshim_vmi_network_transmit_bytes_total", {("eth0",): 2000}),
        ("container_memory_cache", {(): 40}),
        ("container_memory_working_set_bytes", {(): 190}),
        ("container_memory_failures_total", {
            ("pgfault", "container"): 903, ("pgfault", "hierarchy"): 903,
            ("pgmajfault", "container"): 3, ("pgmajfault", "hierarchy"): 3,
        }),
        ("container_cpu_cfs_throttled_seconds_total", {(): 2}),
        ("container_pressure_io_waiting_seconds_total", {(): 5}),
        ("container_pressure_memory_stalled_seconds_total", {(): 2}),
        ("container_hugetlb_max_usage_bytes", {("2MB",): 6}),
        ("container_threads_max", {(): 64}),
        ("container_ulimits_soft", {("max_open_files",): 1024}),
        ("container_spec_cpu_quota", {(): 20_000}),
        ("container_spec_memory_limit_bytes", {(): 64 << 20}),
        ("container_blkio_device_usage_total", {("vda", "Read"): 40960, ("vda", "Write"): 20480}),
        ("virtshim_vmi_memory_used_bytes", {(): 40 << 20}),
        ("virtshim_vmi_storage_iops_read_total", {("vda",): 10}),
    ],
)  # fmt: skip
def test_each_reading_becomes_the_expected_sample(
    client: Client, in_cgroup: None, name: str, expected: dict[tuple[str, ...], int]
) -> None:
    start(client)
    assert values(client, name) == expected


def test_seconds_are_whole_and_counters_are_marked(client: Client, world: World) -> None:
    _, made = start(client)
    world.outside.readings.cpu[world.domain(world.records.containers.all()[0].id)] = 7_950_000_000
    found = {one.name: one for one in flat(metrics(client))}
    assert found["container_cpu_usage_seconds_total"].value.value == 8
    assert found["container_cpu_user_seconds_total"].value.value == 4
    assert found["container_cpu_system_seconds_total"].value.value == 4
    assert found["container_cpu_usage_seconds_total"].metric_type == pb.COUNTER
    assert found["container_memory_rss"].metric_type == pb.GAUGE
    assert found["container_last_seen"].value.value == world.outside.clock.now_ns() // 1_000_000_000
    assert made


def test_a_container_that_does_not_run_has_no_samples_and_its_pod_keeps_its_network(client: Client) -> None:
    _, made = start(client)
    client.stop(made)
    (one,) = metrics(client)
    assert [len(container.metrics) for container in one.container_metrics] == [0]
    assert {metric.name for metric in one.metrics} >= {"container_network_receive_bytes_total"}


def test_a_guest_that_has_not_reported_its_memory_has_no_guest_memory_samples(client: Client, world: World) -> None:
    start(client)
    world.outside.readings.unreported.add(world.domain(world.records.containers.all()[0].id))
    names = {one.name for one in flat(metrics(client))}
    assert "virtshim_vmi_memory_domain_bytes" in names
    assert not names & {"virtshim_vmi_memory_unused_bytes", "virtshim_vmi_memory_used_bytes"}


def test_metrics_come_without_libvirts_numbers_while_libvirt_hangs(client: Client, world: World) -> None:
    start(client)
    world.outside.readings.hung = True
    names = {one.name for one in flat(metrics(client))}
    assert {"container_memory_rss", "container_fs_usage_bytes", "container_network_receive_bytes_total"} <= names
    assert not any(name.startswith("virtshim_vmi_storage") for name in names)


def test_the_stream_has_the_same_metrics_as_the_list(client: Client) -> None:
    start(client)
    client.running("other")
    answers = client.StreamPodSandboxMetrics(pb.StreamPodSandboxMetricsRequest())
    streamed = [one for answer in answers for one in answer.pod_sandbox_metrics]
    listed = metrics(client)
    assert [one.pod_sandbox_id for one in streamed] == [one.pod_sandbox_id for one in listed]
    assert {m.name for m in flat(streamed)} == {m.name for m in flat(listed)}


def test_refused_sessions_of_a_pod_are_counted_by_limit(client: Client, world: World) -> None:
    sandbox, _ = client.running()
    world.outside.streaming.refusals = {"sessions": 3}
    assert refusals(client, sandbox) == {"commands": 0, "connections": 0, "sessions": 3, "urls": 0}


def refusals(client: Client, sandbox: str) -> dict[str, int]:
    answer: pb.ListPodSandboxMetricsResponse = client.ListPodSandboxMetrics(pb.ListPodSandboxMetricsRequest())
    (pod,) = [one for one in answer.pod_metrics if one.pod_sandbox_id == sandbox]
    return {one.label_values[-1]: one.value.value for one in pod.metrics if one.name == "virtshim_refused_total"}
