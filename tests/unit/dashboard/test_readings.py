"""A rate comes from two readings, and an unknown number is None and never 0."""

from __future__ import annotations

import tracemalloc

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.dashboard.node_calls import readings
from virtshim.dashboard.readings import NODE, Counter, Graphs, Rates, Reading, Sample, Timeline, total

SECOND = 10**9


def test_a_rate_is_the_difference_between_two_readings() -> None:
    rates = Rates()
    first = rates.samples(1, {"pod": Reading(cpu=Counter(0, 0), memory=7, received=Counter(0, 1000))})
    assert first["pod"].values() == [None, 7, None, None, None, None]
    second = rates.samples(2, {"pod": Reading(cpu=Counter(2 * SECOND, SECOND), received=Counter(2 * SECOND, 5000))})
    assert second["pod"].values() == [0.5, None, None, None, 2000, None]


def test_no_rate_is_given_across_a_counter_reset_or_a_gap() -> None:
    rates = Rates()
    rates.samples(1, {"pod": Reading(read=Counter(0, 1000))})
    assert rates.samples(2, {"pod": Reading(read=Counter(SECOND, 10))})["pod"].read is None
    rates.forget()
    assert rates.samples(3, {"pod": Reading(read=Counter(2 * SECOND, 20))})["pod"].read is None
    assert rates.samples(4, {"pod": Reading(read=Counter(2 * SECOND, 20))})["pod"].read is None


def test_the_nodes_numbers_are_the_sum_of_the_known_ones() -> None:
    samples = {"a": Sample(1, cpu=0.5, memory=10), "b": Sample(1, cpu=None, memory=5)}
    assert total(1, samples).values() == [0.5, 15, None, None, None, None]
    assert total(1, {}).values() == [None] * 6


def test_the_nodes_statistics_become_counters_by_pod() -> None:
    stats = pb.PodSandboxStats(attributes=pb.PodSandboxAttributes(id="pod"))
    stats.linux.cpu.timestamp, stats.linux.cpu.usage_core_nano_seconds.value = 5, 70
    stats.linux.memory.working_set_bytes.value = 4096
    stats.linux.network.timestamp = 6
    stats.linux.network.default_interface.rx_bytes.value = 10
    stats.linux.network.interfaces.add().rx_bytes.value = 20
    metrics = pb.PodSandboxMetrics(pod_sandbox_id="pod")
    container = metrics.container_metrics.add()
    for name, value in (
        ("virtshim_vmi_storage_read_traffic_bytes_total", 1), ("virtshim_vmi_storage_read_traffic_bytes_total", 2),
        ("virtshim_vmi_memory_domain_bytes", 512), ("virtshim_vmi_vcpu_seconds_total", 9),
    ):  # fmt: skip
        container.metrics.add(name=name).value.value = value
    empty = pb.PodSandboxStats(attributes=pb.PodSandboxAttributes(id="empty"))
    found = readings([stats, empty], [metrics], 9)
    assert found["empty"] == Reading()
    assert found["pod"] == Reading(
        Counter(5, 70), 4096, Counter(9, 3), None, Counter(6, 30), Counter(6, 0), memory_given=512, vcpus=1
    )


def test_an_hour_and_a_day_are_averages_of_what_is_known() -> None:
    graphs = Graphs()
    for at in range(0, 86400, 2):
        graphs.add({"pod": Sample(at, cpu=at % 12, memory=1 << 30, read=None if at % 4 else 8)})
    assert len(graphs.samples("pod")) == 300
    assert graphs.samples("pod")[0].at == 86400 - 600
    for span in (3600, 86400):
        shown = graphs.samples("pod", span=span)
        assert len(shown) == 300
        assert 86400 - span <= shown[0].at < 86400 - span + 2 * span / 300
        assert shown[-1].at == 86398, "up to now"
        assert {(one.cpu, one.memory, one.read, one.written) for one in shown} == {(5, 1 << 30, 8, None)}


def test_the_history_of_a_day_takes_less_than_a_hundred_kilobytes_for_each_pod() -> None:
    tracemalloc.start()
    graphs = Graphs()
    for at in range(0, 86400, 12):
        graphs.add({"pod": Sample(at, *(at + 0.1 * column for column in range(6)))})
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 100_000


def test_a_pods_history_is_limited_and_removed_with_the_pod() -> None:
    graphs = Graphs(samples=3)
    for number in range(5):
        graphs.add({"pod": Sample(number), NODE: Sample(number)})
    assert [sample.at for sample in graphs.samples("pod")] == [2, 3, 4]
    graphs.keep([])
    assert graphs.pods() == [NODE]
    timeline = Timeline(events=2)
    for number in range(4):
        timeline.add(number, "created", "", "x")
    assert [event.number for event in timeline.newest(9)] == [3, 4]
