"""Containers over the wire: each is one virtual machine, one of a pod runs at a time."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.background import Background
from fakes.cri import Client, container, pod, refused, served
from fakes.readings import process_usage
from fakes.waiting import eventually
from fakes.world import IMAGE, LOG_DIRECTORY, Outside, World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.container import ProcessUser, RunAs
from virtshim.model.errors import InternalError, ResourceExhausted, Unavailable
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


# --- what is refused


def test_a_config_without_metadata_or_image_is_refused(client: Client) -> None:
    sandbox = client.run()
    with refused(Code.INVALID_ARGUMENT, "config is missing"):
        client.CreateContainer(pb.CreateContainerRequest(pod_sandbox_id=sandbox))
    with refused(Code.INVALID_ARGUMENT, "metadata is missing"):
        client.CreateContainer(pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=pb.ContainerConfig()))
    with refused(Code.INVALID_ARGUMENT, "name is empty"):
        client.create(sandbox, metadata=pb.ContainerMetadata())
    with refused(Code.INVALID_ARGUMENT, "image is empty"):
        client.create(sandbox, image=pb.ImageSpec())


def test_creating_a_container_of_a_missing_image_returns_not_found(client: Client) -> None:
    with refused(Code.NOT_FOUND, "pull it first"):
        client.create(client.run(), image=pb.ImageSpec(image="registry.test/none:1"))


@pytest.mark.parametrize("name", ["has blank", "ftp://x/y", "name@sha256:short", "a/../b", "x:" + "t" * 129])
def test_a_malformed_image_name_is_refused(client: Client, name: str) -> None:
    with refused(Code.INVALID_ARGUMENT, "malformed image reference"):
        client.create(client.run(), image=pb.ImageSpec(image=name))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"devices": [pb.Device(host_path="/dev/nvidia0")]}, "/dev/nvidia0"),
        (
            {"devices": [pb.Device(host_path="vfio/7", container_path="/x")]},
            r"devices\[vfio/7\]\.host_path is not an absolute",
        ),
        ({"devices": [pb.Device(host_path="/dev/x", permissions="rx")]}, "permissions may be r, w, m only, not 'rx'"),
        ({"CDI_devices": [pb.CDIDevice(name="vendor.com/nic=vf0")]}, "vendor.com/nic=vf0"),
        ({"annotations": {"cdi.k8s.io/x": "vendor.com/nic=vf1"}}, "vendor.com/nic=vf1"),
        (
            {"envs": [pb.KeyValue(key="PCIDEVICE_X", value=b"0000:3b:00.1")]},
            "PCIDEVICE_X: 0000:3b:00.1 was not granted",
        ),
        ({"mounts": [pb.Mount(host_path="/x")]}, "container_path is empty"),
        ({"mounts": [pb.Mount(container_path="/x", propagation=pb.PROPAGATION_BIDIRECTIONAL)]}, "propagat"),
        ({"windows": pb.WindowsContainerConfig()}, "config.windows is for nodes that run Windows"),
        ({"linux": {"security_context": {"capabilities": {"add_ambient_capabilities": ["CHOWN"]}}}}, "add_ambient_cap"),
        ({"log_path": "../../etc/cron.d/x"}, "log_path"),
        ({"log_path": "x" * 256}, "log_path: a path has at most"),
        ({"annotations": {"name": "é" * (256 << 10)}}, "labels and config.annotations hold 524292 bytes"),
    ],
)
def test_settings_that_a_vm_cannot_have_are_refused(client: Client, changes: dict[str, Any], says: str) -> None:
    with refused(Code.INVALID_ARGUMENT, says):
        client.create(client.run(), **changes)
    assert client.containers() == []


def test_a_volume_that_cannot_reach_the_guest_is_refused_and_nothing_is_created(client: Client, world: World) -> None:
    sandbox = client.run()
    before = world.everything()
    status = client.PodSandboxStatus(pb.PodSandboxStatusRequest(pod_sandbox_id=sandbox)).status
    uid = status.metadata.uid
    texts = pb.Mount(container_path="/t", host_path=f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~configmap/c")
    with refused(Code.NOT_FOUND, "kubernetes.io~configmap/c does not exist"):
        client.create(sandbox, mounts=[texts])
    world.outside.shares.missing.add("/srv/gone")
    with refused(Code.NOT_FOUND, "/srv/gone does not exist"):
        client.create(sandbox, mounts=[pb.Mount(container_path="/data", host_path="/srv/gone")])
    with refused(Code.INVALID_ARGUMENT, r"mounts\[/\]: the guest's own root directory"):
        client.create(sandbox, mounts=[pb.Mount(container_path="/", host_path="/srv")])
    world.outside.shares.gone = True
    with refused(Code.UNAVAILABLE, "share program"):
        client.create(sandbox, mounts=[pb.Mount(container_path="/data", host_path="/srv")])
    assert world.everything() == before


def test_volumes_are_served_while_the_vm_runs_and_shown_in_the_status(client: Client, world: World) -> None:
    data = pb.Mount(
        container_path="/data", host_path="/srv", readonly=True, propagation=pb.PROPAGATION_HOST_TO_CONTAINER
    )
    made = client.create(client.run(), mounts=[data])
    shares = world.outside.shares.shares
    assert (list(client.status(made).mounts), shares) == ([data], {})
    client.StartContainer(pb.StartContainerRequest(container_id=made))
    assert list(shares) == [made[:20]]
    client.stop(made, 0)
    assert shares == {}


def test_status_omits_mounts_that_the_guest_does_not_have(client: Client) -> None:
    hosts = pb.Mount(container_path="/etc/hosts", host_path="/var/lib/kubelet/pods/u/etc-hosts")
    made = client.create(client.run(), mounts=[hosts])
    assert list(client.status(made).mounts) == []


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"memory_limit_in_bytes": -1}, "memory_limit_in_bytes is negative"),
        ({"cpu_period": -1}, "cpu_period is negative"),
        ({"memory_limit_in_bytes": 1}, "virtual machine needs"),
        ({"memory_limit_in_bytes": 2**62}, "a virtual machine can have at most"),
        ({"cpu_quota": 2**62}, "vCPUs; this node allows"),
    ],
)
def test_resources_that_no_vm_can_have_are_refused(client: Client, resources: dict[str, int], says: str) -> None:
    linux = pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(**resources))
    with refused(Code.INVALID_ARGUMENT, says):
        client.create(client.run(), linux=linux)


def test_an_unsupported_seccomp_profile_is_refused(client: Client) -> None:
    linux = pb.LinuxContainerConfig(
        security_context=pb.LinuxContainerSecurityContext(seccomp_profile_path="/profiles/x.json")
    )
    with refused(Code.INVALID_ARGUMENT, "/profiles/x.json"):
        client.create(client.run(), linux=linux)


def test_a_namespace_of_the_host_is_refused(client: Client) -> None:
    context = pb.LinuxContainerSecurityContext(namespace_options=pb.NamespaceOption(pid=NODE))
    with refused(Code.INVALID_ARGUMENT, "hostPID"):
        client.create(client.run(), linux=pb.LinuxContainerConfig(security_context=context))


def test_one_error_names_all_faults_of_a_container_config(client: Client) -> None:
    linux = pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(cpu_shares=-1))
    with refused(Code.INVALID_ARGUMENT, "image is empty.*container_path.*host_path.*cpu_shares"):
        client.create(
            client.run(),
            image=pb.ImageSpec(),
            devices=[pb.Device(host_path="dev/kvm")],
            mounts=[pb.Mount()],
            linux=linux,
        )


def test_security_settings_of_the_restricted_policy_reach_commands_in_the_guest(client: Client, world: World) -> None:
    context = pb.LinuxContainerSecurityContext(
        capabilities=pb.Capability(drop_capabilities=["ALL"]),
        run_as_user=pb.Int64Value(value=1000),
        run_as_group=pb.Int64Value(value=1000),
        seccomp_profile_path="runtime/default",
        readonly_rootfs=True,
        no_new_privs=True,
        masked_paths=["/proc/kcore"],
        seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.RuntimeDefault),
    )
    made = client.create(client.run(), linux=pb.LinuxContainerConfig(security_context=context))
    client.start(made)
    client.ExecSync(pb.ExecSyncRequest(container_id=made, cmd=["true"]))
    (command,) = world.outside.guests.commands
    assert command.user == RunAs("1000", 1000, dropped=("all",), no_new_privs=True)
    assert world.container(ContainerId(made)).config.readonly_root


def test_the_status_has_the_user_that_the_command_runs_as(client: Client, world: World) -> None:
    context = pb.LinuxContainerSecurityContext(run_as_user=pb.Int64Value(value=7), supplemental_groups=[8])
    linux = pb.LinuxContainerConfig(security_context=context)
    made = client.create(client.run(), command=["/bin/job"], linux=linux)
    client.start(made)
    eventually(lambda: world.outside.guests.begun)
    assert not client.status(made).HasField("user"), "the guest's own files say which group, and which groups"
    world.outside.guests.process_user = ProcessUser(7, 3, (3, 8, 50000))
    eventually(lambda: client.status(made).HasField("user"))
    user = pb.LinuxContainerUser(uid=7, gid=3, supplemental_groups=[3, 8, 50000])
    assert client.status(made).user == pb.ContainerUser(linux=user)


def test_the_status_has_no_user_if_the_container_has_no_command(client: Client) -> None:
    context = pb.LinuxContainerSecurityContext(run_as_user=pb.Int64Value(value=7), run_as_group=pb.Int64Value(value=3))
    made = client.create(client.run(), linux=pb.LinuxContainerConfig(security_context=context))
    client.start(made)
    assert not client.status(made).HasField("user")


def test_an_unknown_capability_is_refused(client: Client) -> None:
    drop = pb.Capability(drop_capabilities=["CAP_NET_RAW", "net_admin", "FLY"], add_capabilities=["SWIM"])
    linux = pb.LinuxContainerConfig(security_context=pb.LinuxContainerSecurityContext(capabilities=drop))
    with refused(Code.INVALID_ARGUMENT, "drop_capabilities: 'FLY' is not a capability.*add_capabilities: 'SWIM'"):
        client.create(client.run(), linux=linux)


def test_a_second_running_container_in_a_pod_is_refused_with_the_reason(client: Client) -> None:
    sandbox = client.run()
    first, second = client.create(sandbox), client.create(sandbox, "sidecar")
    client.start(first)
    with refused(Code.FAILED_PRECONDITION, "a pod is one virtual machine"):
        client.start(second)
    with refused(Code.FAILED_PRECONDITION, "container 'third' cannot run in this pod: a pod is one virtual machine"):
        client.create(sandbox, "third")
    assert client.status(second).state == pb.CONTAINER_CREATED
    client.stop(first)
    client.start(second)


# --- stop and remove


def test_a_running_container_is_removed_by_force(client: Client, world: World) -> None:
    sandbox, made = client.running()
    client.remove(made)
    client.remove_pod(sandbox)
    assert world.everything() == []


def test_a_negative_grace_period_counts_as_no_grace_period(client: Client) -> None:
    _, made = client.running()
    client.stop(made, -5)
    assert client.status(made).message == "killed: no grace period"


def test_a_guest_that_ignores_shutdown_is_killed_after_the_grace_period(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after = None
    client.stop(made, 45)
    status = client.status(made)
    assert (status.exit_code, status.reason) == (137, "Error")
    assert "within 45 s" in status.message


def test_an_overlapping_stop_with_a_shorter_grace_period_wins(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after, world.outside.clock.held = None, True
    patient = Background(lambda: client.stop(made, 3600))
    world.outside.clock.until_waiting()
    client.stop(made, 0)
    patient.done()
    assert client.status(made).state == pb.CONTAINER_EXITED


def test_after_a_stop_times_out_a_stop_without_grace_period_kills_the_guest(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after, world.outside.clock.held = None, True
    with refused(Code.DEADLINE_EXCEEDED):
        client.StopContainer(pb.StopContainerRequest(container_id=made, timeout=3600), timeout=0.2)
    assert client.status(made).state == pb.CONTAINER_RUNNING
    client.stop(made, 0)
    assert client.status(made).state == pb.CONTAINER_EXITED


def test_lists_and_status_answer_while_many_stops_wait(client: Client, world: World) -> None:
    made = [client.running(f"pod-{n}")[1] for n in range(12)]
    world.outside.vms.shuts_down_after, world.outside.clock.held = None, True
    stops = [Background(lambda one=one: client.stop(one, 3600)) for one in made]
    world.outside.clock.until_waiting(12)
    assert len(client.containers()) == len(client.pods()) == 12
    client.Status(pb.StatusRequest())
    for one in made:
        client.stop(one, 0)
    for stop in stops:
        stop.done()


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


def test_created_at_increases_over_pods_and_containers(client: Client) -> None:
    created = []
    for n in range(4):
        sandbox = client.run(f"pod-{n}")
        made = client.create(sandbox)
        created += [client.pod_status(sandbox).created_at, client.status(made).created_at]
    assert created == sorted(set(created))


# --- failures leave nothing, or something that can be finished


@pytest.mark.parametrize("step", ["disks.create", "seeds.create", "vms.define"])
def test_a_failed_create_leaves_nothing_behind(client: Client, world: World, step: str) -> None:
    sandbox = client.run()
    before = world.everything()
    world.journal.fail(step, ResourceExhausted("no space left; free some"), after=True)
    with refused(Code.RESOURCE_EXHAUSTED, "no space left"):
        client.create(sandbox)
    assert (client.containers(), world.everything()) == ([], before)
    client.create(sandbox)


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
    """kubelet's calls: StopContainer with the grace, ContainerStatus; with restartPolicy OnFailure another attempt unless the
    exit code is 0, which is also what a Job counts as done."""
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
    """kubelet names its file for the termination message anew for each call, and variables come in the order of a Go map."""
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


def test_a_second_stop_with_a_shorter_grace_wins_over_the_wire(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after = None
    world.outside.clock.held = True
    first = Background(lambda: client.stop(made, 600))
    world.outside.clock.until_waiting()
    second = Background(lambda: client.stop(made, 0))
    first.done()
    second.done()
    status = client.status(made)
    assert (status.state, status.exit_code, status.message) == (pb.CONTAINER_EXITED, 137, "killed: no grace period")


def test_a_second_stop_with_a_longer_grace_changes_nothing_over_the_wire(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after = None
    world.outside.clock.held = True
    first = Background(lambda: client.stop(made, 30))
    world.outside.clock.until_waiting()
    second = Background(lambda: client.stop(made, 3600))
    world.outside.clock.advance(30)
    first.done()
    second.done()
    assert "within 30 s" in client.status(made).message


def test_a_stop_goes_on_after_its_client_gave_up_and_a_repeat_joins_it(client: Client, world: World) -> None:
    _, made = client.running()
    world.outside.vms.shuts_down_after = None
    world.outside.clock.held = True
    request = pb.StopContainerRequest(container_id=made, timeout=60)
    given_up = client.runtime.StopContainer.future(request, timeout=20.0)
    world.outside.clock.until_waiting()
    given_up.cancel()
    assert client.status(made).state == pb.CONTAINER_RUNNING
    repeat = Background(lambda: client.stop(made, 60))
    world.outside.clock.advance(60)
    repeat.done()
    assert client.status(made).exit_code == 137
    assert world.journal.count("vms.destroy") == 1
