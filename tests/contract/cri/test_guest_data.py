"""Guests get the Secrets and ConfigMaps that their pods name in annotations."""

import grpc
import pytest
from fakes.cri import Client
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.ids import ContainerId
from virtshim.seed.ports import SeedRequest

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHUH1zzlzhSHrPmrF9JCvKRBPMUKQF3OaUXcSPxUFvRz me"
ASKED = {"VirtletSSHKeySource": "secret/keys", "VirtletCloudInitUserDataSource": "configmap/ud"}


def seed(world: World) -> SeedRequest:
    (request,) = world.outside.seeds.requests.values()
    return request


def test_guest_data_comes_from_objects_of_the_pods_namespace(world: World, client: Client) -> None:
    world.outside.cluster.objects = {
        "default/secret/keys": {"authorized_keys": KEY.encode()},
        "default/configmap/ud": {"packages": b"[vim]"},
        "kube-system/secret/keys": {"authorized_keys": b"of somebody else"},
    }
    client.create(client.run(annotations=ASKED))
    assert seed(world).options.ssh_keys == (KEY,)
    assert seed(world).options.user_data == {"packages": ["vim"]}
    assert {name.partition("/")[0] for name in world.outside.cluster.asked} == {"default"}


def test_a_container_is_refused_until_its_secret_exists(world: World, client: Client) -> None:
    world.outside.cluster.objects = {"default/configmap/ud": {}}
    sandbox = client.run(annotations=ASKED)
    with pytest.raises(grpc.RpcError) as refused:
        client.create(sandbox)
    assert refused.value.details() == "annotation VirtletSSHKeySource: secret default/keys: there is none"
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert client.containers() == []
    world.outside.cluster.objects["default/secret/keys"] = {"authorized_keys": KEY.encode()}
    client.create(sandbox)
    assert seed(world).options.ssh_keys == (KEY,)


FILES = {"VirtletFilesFromDataSource": "secret/files"}


def test_the_guest_gets_files_of_secrets_of_its_own_namespace_only(world: World, client: Client) -> None:
    world.outside.cluster.objects = {
        "default/secret/files": {"conf": b"eA==", "conf_path": b"/etc/app.conf"},
        "kube-system/secret/files": {"conf": b"eQ==", "conf_path": b"/etc/app.conf"},
    }
    client.create(client.run(annotations=FILES))
    assert seed(world).options.files == {"/etc/app.conf": b"x"}
    assert world.outside.cluster.asked == ["default/secret/files"]


def test_a_container_is_refused_if_a_key_of_its_secret_cannot_be_a_file(world: World, client: Client) -> None:
    world.outside.cluster.objects = {"default/secret/files": {"conf": b"eA==", "conf_path": b"../etc"}}
    sandbox = client.run(annotations=FILES)
    with pytest.raises(grpc.RpcError) as refused:
        client.create(sandbox)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "VirtletFilesFromDataSource: secret default/files: key 'conf_path'" in (refused.value.details() or "")
    assert client.containers() == []


def test_kubelets_hosts_file_does_not_replace_one_that_a_pod_names(world: World, client: Client) -> None:
    world.outside.cluster.objects = {"default/secret/files": {"hosts": b"eA==", "hosts_path": b"/etc/hosts"}}
    path = "/var/lib/kubelet/pods/uid-of-web/etc-hosts"
    world.outside.kubelet_volumes.put(path, b"127.0.0.1 localhost\n")
    client.create(client.run(annotations=FILES), mounts=[pb.Mount(container_path="/etc/hosts", host_path=path)])
    assert world.container(seed(world).container).spec.copies == ()


def test_no_record_keeps_the_contents_of_secrets(world: World, client: Client) -> None:
    world.outside.cluster.objects = {
        "default/secret/keys": {"authorized_keys": KEY.encode()},
        "default/configmap/ud": {"password": b"hunter2"},
        "default/secret/files": {"conf": b"hunter2", "conf_path": b"/hunter2", "conf_encoding": b"plain"},
    }
    client.create(client.run(annotations=ASKED | FILES))
    world.records.close()
    assert all(b"hunter2" not in path.read_bytes() for path in world.directory.glob("state.db*"))


IGNITION = '{"ignition": {"version": "3.3.0"}}'


def test_the_ignition_configuration_is_in_the_firmware_and_removed_with_the_container(
    world: World, client: Client
) -> None:
    sandbox = client.run(annotations={"virtshim.io/ignition": IGNITION})
    made = client.create(sandbox)
    (container,) = world.outside.seeds.ignition
    assert world.outside.seeds.ignition[container] == IGNITION
    assert world.outside.vms.spec(world.domain(container)).ignition_file.endswith("/ignition.json")
    client.remove(made)
    assert container not in world.outside.disks.directories


def test_guests_without_ignition_have_no_ignition_file(world: World, client: Client) -> None:
    client.create(client.run())
    assert world.outside.seeds.ignition == {}
    assert world.outside.vms.spec(world.domain(world.records.containers.all()[0].id)).ignition_file == ""


SYSPREP = {"virtshim.io/sysprep": "/sysprep"}
ANSWERS = "/var/lib/kubelet/pods/uid-of-web/volumes/kubernetes.io~secret/answers"


def test_a_secret_for_sysprep_becomes_a_cdrom_and_not_a_volume(world: World, client: Client) -> None:
    world.outside.kubelet_volumes.write(ANSWERS, {"unattend.xml": b"<unattend/>"})
    mounts = [pb.Mount(container_path="/sysprep", host_path=ANSWERS)]
    made = client.create(client.run(annotations=SYSPREP), mounts=mounts)
    (container,) = world.outside.seeds.sysprep
    assert world.outside.seeds.sysprep[container] == {"unattend.xml": b"<unattend/>"}
    assert world.outside.vms.spec(world.domain(container)).sysprep_iso.endswith("/sysprep.iso")
    assert (seed(world).volumes, seed(world).copies) == ((), ())
    assert world.container(container).spec.copies == ()
    client.remove(made)
    assert container not in world.outside.disks.directories


def test_a_sysprep_secret_without_an_answer_file_is_refused_before_anything_is_created(
    world: World, client: Client
) -> None:
    """A secret with a file name that no CD-ROM can have is refused, too."""
    sandbox = client.run(annotations=SYSPREP)
    for there in ({"other": b""}, {"unattend.xml": b"", "x" * 65: b""}):
        world.outside.kubelet_volumes.write(ANSWERS, there)
        with pytest.raises(grpc.RpcError) as refused:
            client.create(sandbox, mounts=[pb.Mount(container_path="/sysprep", host_path=ANSWERS)])
        assert "annotation virtshim.io/sysprep: " in str(refused.value.details())
    assert client.containers() == []
    assert world.outside.disks.directories == {}


def test_a_pod_that_does_not_mount_its_sysprep_secret_is_refused_with_its_mounts(world: World, client: Client) -> None:
    """kubelet's list, which has no init containers, shows that this is not an init container."""
    world.outside.devices.listed = {("default", "web", "windows")}
    world.outside.kubelet_volumes.write(ANSWERS, {"unattend.xml": b"<unattend/>"})
    sandbox = client.run(annotations=SYSPREP)
    with pytest.raises(grpc.RpcError) as refused:
        client.create(sandbox, "windows", mounts=[pb.Mount(container_path="/sysprpe", host_path=ANSWERS)])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "virtshim.io/sysprep: no container of the pod mounts anything at /sysprep" in str(refused.value.details())
    assert "at /sysprpe; write one of these mountPaths" in str(refused.value.details())
    assert client.containers() == []
    client.create(sandbox, "prepare", mounts=[])
    client.create(sandbox, "windows", mounts=[pb.Mount(container_path="/sysprep", host_path=ANSWERS)])


@pytest.mark.parametrize("excuse", ["an init container had them", "it ran before", "its disk is a volume"])
def test_a_container_that_may_have_run_sysprep_already_needs_no_answer_file(
    world: World, client: Client, excuse: str
) -> None:
    world.outside.devices.listed = {("default", "web", "windows")}
    world.outside.kubelet_volumes.write(ANSWERS, {"unattend.xml": b"<unattend/>"})
    sandbox = client.run(annotations=SYSPREP)
    if excuse == "an init container had them":
        mounts = [pb.Mount(container_path="/sysprep", host_path=ANSWERS)]
        before = client.create(sandbox, "prepare", mounts=mounts)
        client.start(before)
        world.outside.vms.ask_to_shut_down(world.domain(ContainerId(before)))
        world.outside.vms.settle()
    attempt = 1 if excuse == "it ran before" else 0
    devices = (
        [pb.Device(container_path="/", host_path="/dev/block/pv", permissions="rwm")] if "volume" in excuse else []
    )
    client.create(sandbox, "windows", attempt, devices=devices)


def test_an_init_container_need_not_mount_the_sysprep_secret(world: World, client: Client) -> None:
    world.outside.kubelet_volumes.write(ANSWERS, {"unattend.xml": b"<unattend/>"})
    sandbox = client.run(annotations=SYSPREP)
    before = client.create(sandbox, "prepare")
    domain = world.domain(ContainerId(before))
    assert world.outside.vms.spec(domain).sysprep_iso == ""
    client.start(before)
    world.outside.vms.ask_to_shut_down(domain)
    world.outside.vms.settle()
    made = client.create(sandbox, "windows", mounts=[pb.Mount(container_path="/sysprep", host_path=ANSWERS)])
    assert set(world.outside.seeds.sysprep) == {ContainerId(made)}
