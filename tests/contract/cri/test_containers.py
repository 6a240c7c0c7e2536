"""Each container is one virtual machine, and one container of a pod runs at a time."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.background import Background
from fakes.cri import Client, container, pod, refused, served
from fakes.readings import process_usage
from fakes.world import IMAGE, LOG_DIRECTORY, Outside, World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InternalError, Unavailable
from virtshim.model.ids import ContainerId
from virtshim.model.vm import OffReason

pytestmark = pytest.mark.cri

Code = grpc.StatusCode
LABELS = {"io.kubernetes.container.name": "vm", "π": "ünï\n", "": ""}
ANNOTATIONS = {"io.kubernetes.container.hash": "1f", "io.kubernetes.container.restartCount": "0", "x": "\t\0'\""}
NODE = pb.NamespaceMode.Value("NODE")
MIB = 1 << 20


def domain(world: World, made: str) -> Any:
    return world.domain(ContainerId(made))


# --- life


def test_a_container_is_created_runs_exits_and_is_removed(client: Client, world: World) -> None:
    sandbox = client.run()
    made = client.create(sandbox)
    assert client.status(made).state == pb.CONTAINER_CREATED
    client.start(made)
    assert client.status(made).state == pb.CONTAINER_RUNNING
    client.stop(made, 30)
    assert client.status(made).state == pb.CONTAINER_EXITED
    client.remove(made)
    assert client.containers() == []
    with refused(Code.NOT_FOUND, "no such container"):
        client.status(made)
    client.remove_pod(sandbox)
    assert world.everything() == []


def test_status_has_everything_that_kubelet_reads(client: Client, world: World) -> None:
    resources = pb.LinuxContainerResources(
        cpu_shares=512, cpu_quota=150_000, cpu_period=100_000, memory_limit_in_bytes=512 * MIB, oom_score_adj=-997
    )
    mounts = [pb.Mount(container_path="/dev/termination-log", host_path="/var/lib/x")]
    told = {"io.kubernetes.container.terminationMessagePath": "/dev/termination-log"}
    config = container(
        "vm",
        3,
        labels=LABELS,
        annotations=ANNOTATIONS | told,
        mounts=mounts,
        linux=pb.LinuxContainerConfig(resources=resources),
    )
    request = pb.CreateContainerRequest(pod_sandbox_id=client.run(), config=config)
    made = client.CreateContainer(request).container_id
    (image,) = world.images.all()
    status = client.status(made)
    assert (status.id, status.metadata) == (made, config.metadata)
    assert (dict(status.labels), dict(status.annotations)) == (LABELS, ANNOTATIONS | told)
    assert list(status.mounts) == mounts
    assert status.log_path == f"{LOG_DIRECTORY}/vm/3.log"
    assert status.resources.linux == resources
    assert (status.image.image, status.image.user_specified_image) == (IMAGE, IMAGE)
    assert status.image_ref == image.repo_digests[0]
    assert status.image_id == image.digest.value
    assert status.created_at > 0
    assert (status.started_at, status.finished_at, status.exit_code, status.reason) == (0, 0, 0, "")


def test_timestamps_are_in_order_and_do_not_change(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.clock.advance(60)
    running = client.status(made)
    client.stop(made, 30)
    ended = client.status(made)
    assert 0 < ended.created_at <= ended.started_at < ended.finished_at
    assert (running.created_at, running.started_at) == (ended.created_at, ended.started_at)
    world.outside.clock.advance(60)
    client.stop(made)
    assert client.status(made) == ended


def test_the_list_agrees_with_the_status(client: Client) -> None:
    sandbox = client.run()
    made = client.create(sandbox, labels=LABELS, annotations=ANNOTATIONS)
    status = client.status(made)
    (item,) = client.containers()
    assert item.pod_sandbox_id == sandbox
    for field in ("id", "metadata", "state", "created_at", "labels", "annotations", "image", "image_ref", "image_id"):
        assert getattr(item, field) == getattr(status, field), field


def test_all_four_image_fields_hold_the_same_id(client: Client) -> None:
    pulled = client.pull()
    sandbox = client.run()
    made = client.create(sandbox, image=pb.ImageSpec(image=pulled, user_specified_image=IMAGE))
    listed = client.ImageStatus(pb.ImageStatusRequest(image=pb.ImageSpec(image=IMAGE))).image.id
    (item,) = client.containers()
    assert pulled == listed == item.image_id == client.status(made).image_id
    assert client.status(made).image.image == IMAGE  # what people wrote, not the id that kubelet sent


def test_verbose_status_has_the_disk_console_log_and_domain_uuid(client: Client) -> None:
    _, made = client.running()
    info = client.ContainerStatus(pb.ContainerStatusRequest(container_id=made, verbose=True)).info
    facts = json.loads(info["info"])
    assert facts["rootDisk"].endswith("root.qcow2")
    assert set(facts) >= {"domainUUID", "consoleLog", "sandboxID", "phase"}


def test_verbose_status_has_the_vm_name_that_virsh_and_ps_show(client: Client, world: World) -> None:
    _, made = client.running()
    facts = verbose(client, made)
    (owned,) = world.outside.vms.owned_now()
    assert facts["domainName"] == owned.name
    assert facts["qemuPid"] == process_usage().pid
    client.stop(made)
    assert verbose(client, made)["qemuPid"] == 0


def verbose(client: Client, container_id: str) -> dict[str, Any]:
    request = pb.ContainerStatusRequest(container_id=container_id, verbose=True)
    facts: dict[str, Any] = json.loads(client.ContainerStatus(request).info["info"])
    return facts


@pytest.mark.parametrize(
    ("reason", "code", "text"),
    [(OffReason.SHUTDOWN, 0, "Completed"), (OffReason.CRASHED, 137, "Error"), (OffReason.FAILED, 137, "Error")],
)
def test_the_way_a_vm_ends_decides_exit_code_and_reason(
    client: Client, world: World, reason: OffReason, code: int, text: str
) -> None:
    _, made = client.running()
    world.outside.vms.end(domain(world, made), reason)
    world.outside.vms.deliver()
    status = client.status(made)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, code, text)


def test_environment_values_that_are_not_text_are_accepted(client: Client, world: World) -> None:
    made = client.create(client.run(), envs=[pb.KeyValue(key="K", value=b"\xff\x00")])
    assert world.container(ContainerId(made)).config.envs == (("K", b"\xff\x00"),)


# --- ids and filters


def test_filters_narrow_the_list_and_all_must_match(client: Client) -> None:
    pod_one, one = client.running("one")
    pod_two = client.run("two")
    two = client.create(pod_two, "a", labels={"app": "db", "tier": "back"})
    three = client.create(pod_two, "b", labels={"app": "db"})
    running, created = (pb.ContainerStateValue(state=state) for state in (pb.CONTAINER_RUNNING, pb.CONTAINER_CREATED))

    def listed(**wanted: Any) -> list[str]:
        return [item.id for item in client.containers(**wanted)]

    assert listed() == [one, two, three]
    assert listed(id=one) == listed(state=running) == listed(pod_sandbox_id=pod_one) == [one]
    assert (
        listed(state=created) == listed(pod_sandbox_id=pod_two) == listed(label_selector={"app": "db"}) == [two, three]
    )
    assert listed(pod_sandbox_id=pod_two[:20], label_selector={"tier": "back"}) == [two]
    assert listed(id=one[:20], state=running) == [one]
    assert listed(id=one, pod_sandbox_id=pod_two) == listed(state=running, label_selector={"app": "db"}) == []


def test_creation_times_increase_over_pods_and_containers(client: Client) -> None:
    created = []
    for n in range(4):
        sandbox = client.run(f"pod-{n}")
        made = client.create(sandbox)
        created += [client.pod_status(sandbox).created_at, client.status(made).created_at]
    assert created == sorted(set(created))


# --- failures leave nothing, or something that can be finished


def test_a_container_that_cannot_start_shows_the_reason_and_stays_listed(client: Client, world: World) -> None:
    made = client.create(client.run())
    world.journal.fail("vms.start", InternalError("QEMU: could not open root.qcow2"))
    with refused(Code.INTERNAL, "could not open root.qcow2"):
        client.start(made)
    status = client.status(made)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 128, "StartError")
    assert "root.qcow2" in status.message
    assert status.finished_at > 0


def test_after_a_failed_removal_the_state_is_unknown_and_removal_can_be_repeated(client: Client, world: World) -> None:
    sandbox, made = client.running()
    world.journal.fail("vms.destroy", Unavailable("libvirt cannot be reached"))
    with refused(Code.UNAVAILABLE, "libvirt cannot be reached"):
        client.remove(made)
    assert client.status(made).state == pb.CONTAINER_UNKNOWN  # kubelet kills and replaces it
    client.remove(made)
    client.remove_pod(sandbox)
    assert world.everything() == []


def test_a_repeat_of_a_slow_create_joins_it(client: Client, world: World) -> None:
    sandbox = client.run()
    gate = world.journal.hold("disks.create")
    request = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=container(), sandbox_config=pod())
    with refused(Code.DEADLINE_EXCEEDED):
        client.CreateContainer(request, timeout=0.2)
    gate.wait()
    assert client.containers() == []
    repeat = Background(lambda: client.CreateContainer(request).container_id)
    gate.open()
    made = repeat.done()
    assert [item.id for item in client.containers()] == [made]
    assert world.journal.count("disks.create") == 1


def test_a_container_killed_for_its_liveness_probe_is_restarted_on_failure(client: Client, world: World) -> None:
    """kubelet calls StopContainer with the grace period, then ContainerStatus. With restartPolicy OnFailure it starts
    another attempt unless the exit code is 0, which is also what makes a Job complete."""
    sandbox, made = client.running()
    client.stop(made, 30)
    status = client.status(made)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 143, "Error")
    again = client.create(sandbox, attempt=1)
    client.start(again)
    world.outside.vms.end(domain(world, again), OffReason.SHUTDOWN)  # now it powers itself off
    world.deliver()
    status = client.status(again)
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 0, "Completed")


def as_kubelet_sends_it(host_path: str, *names: str) -> pb.ContainerConfig:
    """In each call kubelet uses a new file name for the termination message, and variables come in the order of a Go
    map."""
    config = container(annotations={"io.kubernetes.container.terminationMessagePath": "/dev/termination-log"})
    config.mounts.add(
        container_path="/dev/termination-log", host_path=f"/var/lib/kubelet/pods/uid/containers/vm/{host_path}"
    )
    for name in names:
        config.envs.add(key=name, value=f"of {name}".encode())
    return config


def test_a_create_repeated_by_kubelet_joins_the_first_call_or_gets_its_result(client: Client, world: World) -> None:
    sandbox = client.run()
    gate = world.journal.hold("disks.create")
    first = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=as_kubelet_sends_it("0a1b2c3d", "A", "B", "C"))
    again = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=as_kubelet_sends_it("4e5f6a7b", "C", "A", "B"))
    with refused(Code.DEADLINE_EXCEEDED):
        client.CreateContainer(first, timeout=0.2)
    gate.wait()
    repeat = Background(lambda: client.CreateContainer(again).container_id)
    gate.open()
    made = repeat.done()
    assert client.CreateContainer(again).container_id == made
    (mount,) = client.status(str(made)).mounts
    assert mount.host_path.endswith("/0a1b2c3d"), "where kubelet reads is what the status says"
    different = as_kubelet_sends_it("0a1b2c3d", "A", "B")
    with refused(Code.ALREADY_EXISTS):
        client.CreateContainer(pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=different))


def test_answers_are_the_same_after_a_restart_of_the_daemon(tmp_path: Path) -> None:
    outside = Outside()
    with served(tmp_path, outside) as (world, client, _):
        world.pull()
        sandbox = client.run(labels=LABELS, annotations=ANNOTATIONS)
        made = client.create(sandbox, labels=LABELS, annotations=ANNOTATIONS)
        client.start(made)
        assert dict(client.status(made).labels) == dict(client.pod_status(sandbox).labels) == LABELS
        before = (client.pod_status(sandbox), client.status(made), client.pods(), client.containers())
    with served(tmp_path, outside) as (world, client, _):
        assert (client.pod_status(sandbox), client.status(made), client.pods(), client.containers()) == before
        client.stop(made, 30)
        assert client.status(made).exit_code == 143
        client.remove_pod(sandbox)
        assert world.everything() == []


def test_the_status_has_the_stop_signal(client: Client) -> None:
    made = client.create(client.run(), stop_signal=pb.Signal.Value("SIGNAL_SIGUSR1"))
    assert client.status(made).stop_signal == pb.Signal.Value("SIGNAL_SIGUSR1")
