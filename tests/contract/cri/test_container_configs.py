"""CreateContainer names every field of a container's config that a VM cannot have, and accepts the rest."""

from typing import Any

import grpc
import pytest
from fakes.cri import Client, refused
from fakes.waiting import eventually
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.container import ProcessUser, RunAs
from virtshim.model.ids import ContainerId

pytestmark = pytest.mark.cri

Code = grpc.StatusCode
NODE = pb.NamespaceMode.Value("NODE")


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
