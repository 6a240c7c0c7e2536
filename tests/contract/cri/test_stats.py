"""kubelet and crictl can read the usage of containers and pods."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest
from fakes.cri import Client, container, pod, refused
from fakes.networks import usage
from fakes.readings import MIB
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InternalError, Unavailable

pytestmark = pytest.mark.cri


def stats(client: Client, **wanted: Any) -> list[pb.ContainerStats]:
    request = pb.ListContainerStatsRequest()
    if wanted:
        request.filter.MergeFrom(pb.ContainerStatsFilter(**wanted))
    return list(client.ListContainerStats(request).stats)


def streamed(client: Client, **wanted: Any) -> list[pb.ContainerStats]:
    request = pb.StreamContainerStatsRequest(filter=pb.ContainerStatsFilter(**wanted))
    return [one for answer in client.StreamContainerStats(request) for one in answer.container_stats]


def pod_stats(client: Client, **wanted: Any) -> list[pb.PodSandboxStats]:
    request = pb.ListPodSandboxStatsRequest()
    if wanted:
        request.filter.MergeFrom(pb.PodSandboxStatsFilter(**wanted))
    return list(client.ListPodSandboxStats(request).stats)


def ids(found: list[Any]) -> set[str]:
    return {one.attributes.id for one in found}


def start(client: Client, sandbox: str, **changes: Any) -> str:
    made = client.create(sandbox, **changes)
    client.start(made)
    return made


# --- one container


def test_a_running_container_has_every_number_kubelet_reads(client: Client, world: World) -> None:
    sandbox = client.run()
    limits = pb.LinuxContainerResources(memory_limit_in_bytes=512 * MIB)
    linux = pb.LinuxContainerConfig(resources=limits)
    made = start(client, sandbox, linux=linux, labels={"a": "b"}, annotations={"c": "d"})
    now = world.outside.clock.now_ns()
    (found,) = stats(client)
    assert found.attributes == pb.ContainerAttributes(
        id=made, metadata=pb.ContainerMetadata(name="vm"), labels={"a": "b"}, annotations={"c": "d"}
    )
    assert found.cpu == pb.CpuUsage(timestamp=now, usage_core_nano_seconds=pb.UInt64Value(value=100_000_000))
    assert found.memory == pb.MemoryUsage(
        timestamp=now,
        working_set_bytes=pb.UInt64Value(value=150 * MIB),
        available_bytes=pb.UInt64Value(value=362 * MIB),
        usage_bytes=pb.UInt64Value(value=170 * MIB),
        rss_bytes=pb.UInt64Value(value=150 * MIB),
        page_faults=pb.UInt64Value(value=903),
        major_page_faults=pb.UInt64Value(value=3),
    )
    assert found.writable_layer.timestamp > 0
    assert found.writable_layer.fs_id.mountpoint == "/state/containers"
    assert found.writable_layer.used_bytes.value == 3 * MIB
    assert found.writable_layer.inodes_used.value == 4
    assert found.swap == pb.SwapUsage(timestamp=now, swap_usage_bytes=pb.UInt64Value(value=0))
    assert not found.HasField("io")
    assert client.ContainerStats(pb.ContainerStatsRequest(container_id=made)).stats.attributes == found.attributes


def test_without_a_memory_limit_available_memory_is_not_reported(client: Client) -> None:
    client.running()
    (found,) = stats(client)
    assert not found.memory.HasField("available_bytes")


def test_a_second_sample_has_a_new_time_more_cpu_and_a_rate(client: Client, world: World) -> None:
    client.running()
    (first,) = stats(client)
    world.outside.clock.advance(1.0)
    (second,) = stats(client)
    assert second.cpu.timestamp - first.cpu.timestamp == 1_000_000_000
    assert second.cpu.usage_core_nano_seconds.value > first.cpu.usage_core_nano_seconds.value
    assert not first.cpu.HasField("usage_nano_cores")
    assert second.cpu.usage_nano_cores.value == 100_000_000


def test_a_container_that_does_not_run_has_attributes_and_disk_only(client: Client) -> None:
    sandbox = client.run()
    made = client.create(sandbox)
    (created,) = stats(client)
    client.start(made)
    client.stop(made)
    exited = client.ContainerStats(pb.ContainerStatsRequest(container_id=made)).stats
    for found, files in ((created, 3), (exited, 2)):  # the disk itself went with the end
        assert found.attributes.metadata.name == "vm"
        assert found.writable_layer.used_bytes.value == files * MIB
        assert not found.HasField("cpu")
        assert not found.HasField("memory")


def test_a_container_is_found_by_prefix_and_a_missing_one_is_not_found(client: Client) -> None:
    _, made = client.running()
    assert client.ContainerStats(pb.ContainerStatsRequest(container_id=made[:7])).stats.attributes.id == made
    with refused(grpc.StatusCode.NOT_FOUND, "no such container"):
        client.ContainerStats(pb.ContainerStatsRequest(container_id="f" * 64))


# --- lists


def test_a_container_must_match_all_filters(client: Client) -> None:
    one, two = client.run("one"), client.run("two")
    first = start(client, one, labels={"app": "a", "tier": "x"})
    second = start(client, two, labels={"app": "a", "tier": "y"})
    assert ids(stats(client)) == ids(stats(client, label_selector={"app": "a"})) == {first, second}
    assert ids(stats(client, id=first)) == ids(stats(client, id=first[:9])) == {first}
    assert ids(stats(client, pod_sandbox_id=two)) == {second}
    assert ids(stats(client, label_selector={"app": "a", "tier": "y"})) == {second}
    assert ids(stats(client, pod_sandbox_id=one, label_selector={"tier": "y"})) == set()
    assert ids(stats(client, id=first, pod_sandbox_id=two)) == set()


def test_a_list_takes_one_reading_for_any_number_of_vms(client: Client, world: World) -> None:
    for name in ("one", "two", "three"):
        client.running(name)
    world.outside.readings.calls = 0
    assert len(stats(client)) == 3
    assert world.outside.readings.calls == 1


def test_the_stream_has_the_same_items_as_the_list_in_batches(client: Client) -> None:
    assert streamed(client) == []
    made = {client.running(name)[1] for name in ("one", "two", "three")}
    assert ids(streamed(client)) == made
    pods = list(client.StreamPodSandboxStats(pb.StreamPodSandboxStatsRequest()))
    assert {one.attributes.metadata.name for answer in pods for one in answer.pod_sandbox_stats} == {
        "one",
        "two",
        "three",
    }


# --- trouble


def test_a_vm_without_numbers_does_not_fail_the_list(client: Client, world: World) -> None:
    _, healthy = client.running("healthy")
    _, broken = client.running("broken")
    found = next(c for c in world.records.containers.all() if c.id.value == broken)
    world.outside.readings.silent = {world.domain(found.id)}
    by_id = {one.attributes.id: one for one in stats(client)}
    assert by_id[healthy].cpu.usage_core_nano_seconds.value > 0
    assert not by_id[broken].HasField("cpu")
    assert by_id[broken].memory.working_set_bytes.value == 150 * MIB
    assert by_id[broken].writable_layer.used_bytes.value > 0


def test_while_libvirt_hangs_the_last_cpu_sample_keeps_its_own_time(client: Client, world: World) -> None:
    client.running()
    (before,) = stats(client)
    world.outside.readings.hung = True
    world.outside.clock.advance(5.0)
    (meanwhile,) = stats(client)
    assert meanwhile.cpu == before.cpu
    assert meanwhile.memory.timestamp > before.memory.timestamp
    world.outside.readings.hung = False
    (after,) = stats(client)
    assert after.cpu.timestamp > before.cpu.timestamp
    assert after.cpu.usage_core_nano_seconds.value > before.cpu.usage_core_nano_seconds.value


@pytest.mark.parametrize("error", [Unavailable("tapmanager is gone"), InternalError("no such verb")])
def test_without_tapmanager_pods_lack_only_network_numbers(client: Client, world: World, error: Exception) -> None:
    client.running()
    world.journal.fail("networks.counters", error)
    (found,) = pod_stats(client)
    assert not found.linux.HasField("network")
    assert found.linux.cpu.usage_core_nano_seconds.value > 0


def test_an_unreadable_disk_costs_only_its_own_number(client: Client, world: World) -> None:
    client.running()
    world.journal.fail("disks.use", InternalError("I/O error"))
    (found,) = stats(client)
    assert not found.HasField("writable_layer")
    assert found.HasField("memory")


def test_a_list_does_not_wait_for_a_container_that_is_being_stopped(client: Client, world: World) -> None:
    _, made = client.running()
    gate = world.journal.hold("vms.destroy")
    stopping = client.runtime.StopContainer.future(pb.StopContainerRequest(container_id=made), timeout=20)
    gate.wait()
    assert ids(stats(client)) == {made}
    assert not stopping.done()
    gate.open()
    stopping.result()


# --- pods


def test_the_numbers_of_a_pod_are_those_of_its_vms_and_its_network(client: Client, world: World) -> None:
    sandbox, made = client.running(labels={"a": "b"}, annotations={"c": "d"})
    (found,) = pod_stats(client)
    now = world.outside.clock.now_ns()
    assert found.attributes == pb.PodSandboxAttributes(
        id=sandbox, metadata=pod().metadata, labels={"a": "b"}, annotations={"c": "d"}
    )
    (inner,) = found.linux.containers
    assert inner.attributes.id == made
    assert found.linux.cpu == inner.cpu
    assert found.linux.memory == inner.memory
    assert found.linux.process == pb.ProcessUsage(timestamp=now, process_count=pb.UInt64Value(value=1))
    assert found.linux.network == pb.NetworkUsage(
        timestamp=now,
        default_interface=pb.NetworkInterfaceUsage(
            name="eth0",
            rx_bytes=pb.UInt64Value(value=1000),
            rx_errors=pb.UInt64Value(value=1),
            tx_bytes=pb.UInt64Value(value=2000),
            tx_errors=pb.UInt64Value(value=3),
        ),
    )
    one = client.PodSandboxStats(pb.PodSandboxStatsRequest(pod_sandbox_id=sandbox[:10])).stats
    assert one.attributes == found.attributes
    assert one.linux.network == found.linux.network


def test_the_first_nic_of_the_pod_is_the_default_and_others_follow(client: Client, world: World) -> None:
    sandbox, _ = client.running()
    (record,) = world.records.sandboxes.all()
    assert record.network is not None
    first = record.network.interfaces[0]
    nics = (first, dataclasses.replace(first, name="net1"))
    network = dataclasses.replace(record.network, interfaces=nics)
    world.records.sandboxes.replace(dataclasses.replace(record, network=network))
    world.outside.networks.counted[record.id] = [usage("net1"), usage("eth0")]
    (found,) = pod_stats(client, id=sandbox)
    assert found.linux.network.default_interface.name == "eth0"
    assert [one.name for one in found.linux.network.interfaces] == ["net1"]
    world.outside.networks.counted[record.id] = [usage("net1")]
    (found,) = pod_stats(client, id=sandbox)
    assert not found.linux.HasField("network"), "a network without its default interface ends kubelet"


def test_statistics_of_stopped_and_empty_pods_have_the_known_numbers(client: Client) -> None:
    empty = client.run("empty")
    stopped, _ = client.running("stopped")
    client.stop_pod(stopped)
    by_id = {one.attributes.id: one for one in pod_stats(client)}
    assert set(by_id) == {empty, stopped}
    for found in by_id.values():
        assert found.attributes.HasField("metadata")
        assert found.HasField("linux")
        assert not found.linux.HasField("cpu")
        assert found.linux.process.process_count.value == 0
    assert by_id[empty].linux.HasField("network")
    assert not by_id[stopped].linux.HasField("network")


def test_pods_are_filtered_by_id_and_labels(client: Client) -> None:
    one = client.run("one", labels={"app": "a"})
    two = client.run("two", labels={"app": "b"})
    assert ids(pod_stats(client)) == {one, two}
    assert ids(pod_stats(client, id=one[:12])) == {one}
    assert ids(pod_stats(client, label_selector={"app": "b"})) == {two}
    assert ids(pod_stats(client, id=one, label_selector={"app": "b"})) == set()
    with refused(grpc.StatusCode.NOT_FOUND, "no such pod sandbox"):
        client.PodSandboxStats(pb.PodSandboxStatsRequest(pod_sandbox_id="e" * 64))


def test_successive_containers_of_a_pod_have_separate_numbers(client: Client) -> None:
    sandbox, first = client.running()
    client.stop(first)
    second = client.create(sandbox, attempt=1)
    client.start(second)
    (found,) = pod_stats(client)
    by_id = {one.attributes.id: one for one in found.linux.containers}
    assert set(by_id) == {first, second}
    assert not by_id[first].HasField("cpu")
    assert found.linux.cpu == by_id[second].cpu
    assert container(attempt=1).metadata == by_id[second].attributes.metadata
