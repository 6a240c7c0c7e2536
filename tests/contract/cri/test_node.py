"""The calls about the node itself report version and conditions, and refuse what is not implemented."""

import errno
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.cri import Client, container, refused, served
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.config.settings import Cri
from virtshim.model.errors import PermissionRefused, WrongState
from virtshim.system.grpc_socket import SocketLock

pytestmark = pytest.mark.cri

SERVICES = [pb.DESCRIPTOR.services_by_name[name] for name in ("RuntimeService", "ImageService")]
RPCS = {method.name: method for service in SERVICES for method in service.methods}
IMPLEMENTED = {
    *("Version", "Status", "RuntimeConfig", "UpdateRuntimeConfig", "ReopenContainerLog"),
    *("RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "PodSandboxStatus", "ListPodSandbox"),
    *("CreateContainer", "StartContainer", "StopContainer", "RemoveContainer", "ContainerStatus", "ListContainers"),
    *("PullImage", "ListImages", "ImageStatus", "RemoveImage", "ImageFsInfo"),
    *("StreamPodSandboxes", "StreamContainers", "StreamImages", "GetContainerEvents"),
    *("ContainerStats", "ListContainerStats", "StreamContainerStats"),
    *("PodSandboxStats", "ListPodSandboxStats", "StreamPodSandboxStats"),
    *("Exec", "Attach", "PortForward"),
    *("ListMetricDescriptors", "ListPodSandboxMetrics", "StreamPodSandboxMetrics"),
    "ExecSync",
    *("UpdateContainerResources", "UpdatePodSandboxResources"),
    "CheckpointContainer",
}


def request_for(rpc: str) -> Any:
    return getattr(pb, RPCS[rpc].input_type.name)()


@pytest.mark.parametrize("asked", ["", "0.1.0", "v1", "anything"])
def test_version_is_what_kubelet_expects_for_any_request(client: Client, world: World, asked: str) -> None:
    assert client.Version(pb.VersionRequest(version=asked)) == pb.VersionResponse(
        version="0.1.0",
        runtime_name="virtshim",
        runtime_version=world.do.node.version,
        runtime_api_version="v1",
    )
    assert all(part.isdigit() for part in world.do.node.version.split("."))


def test_status_has_both_conditions_and_every_handler(client: Client) -> None:
    answer = client.Status(pb.StatusRequest())
    assert [(c.type, c.status, c.reason, c.message) for c in answer.status.conditions] == [
        ("RuntimeReady", True, "", ""),
        ("NetworkReady", True, "", ""),
    ]
    assert [handler.name for handler in answer.runtime_handlers] == ["", "virtshim"]
    assert all(handler.features.recursive_read_only_mounts for handler in answer.runtime_handlers)
    assert answer.features == pb.RuntimeFeatures(supplemental_groups_policy=True)
    assert not answer.info


def test_a_false_condition_has_a_reason(client: Client, world: World) -> None:
    world.outside.vms.why_not = "libvirt cannot be reached; start libvirtd"
    world.outside.networks.why_not = "no CNI configuration in /etc/cni/net.d"
    conditions = client.Status(pb.StatusRequest()).status.conditions
    assert [(c.type, c.status, c.reason, c.message) for c in conditions] == [
        ("RuntimeReady", False, "HypervisorUnavailable", "libvirt cannot be reached; start libvirtd"),
        ("NetworkReady", False, "NetworkPluginNotReady", "no CNI configuration in /etc/cni/net.d"),
    ]


def test_verbose_status_carries_json(client: Client, world: World) -> None:
    info = client.Status(pb.StatusRequest(verbose=True)).info
    assert json.loads(info["config"])["nodeId"] == world.records.node_id()


@pytest.mark.parametrize(("setting", "driver"), [("systemd", pb.SYSTEMD), ("cgroupfs", pb.CGROUPFS)])
def test_runtime_config_has_the_configured_cgroup_driver(tmp_path: Path, setting: str, driver: int) -> None:
    with served(tmp_path, cri={"cgroup_driver": setting}) as (_, client, _):
        answer = client.RuntimeConfig(pb.RuntimeConfigRequest())
    assert answer.HasField("linux")
    assert answer.linux.cgroup_driver == driver


@pytest.mark.parametrize("cidr", ["", "10.88.0.0/16", "10.88.0.0/16,fd00::/64", "no address"])
def test_the_pod_cidr_from_kubelet_is_accepted(client: Client, cidr: str) -> None:
    config = pb.RuntimeConfig(network_config=pb.NetworkConfig(pod_cidr=cidr))
    client.UpdateRuntimeConfig(pb.UpdateRuntimeConfigRequest(runtime_config=config))


@pytest.mark.parametrize("rpc", sorted(set(RPCS) - IMPLEMENTED))
def test_calls_that_are_not_implemented_return_unimplemented(client: Client, rpc: str) -> None:
    with refused(grpc.StatusCode.UNIMPLEMENTED, f"virtshim does not implement {rpc} yet"):
        answer = getattr(client, rpc)(request_for(rpc))
        if RPCS[rpc].server_streaming:
            list(answer)


@pytest.mark.parametrize("rpc", sorted(IMPLEMENTED))
def test_every_implemented_call_answers_an_empty_request_or_refuses_it_as_invalid(client: Client, rpc: str) -> None:
    try:
        answer = getattr(client, rpc)(request_for(rpc))
        if rpc == "GetContainerEvents":
            answer.initial_metadata()  # it answers, but never ends
            answer.cancel()
        elif RPCS[rpc].server_streaming:
            list(answer)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details()


def test_a_bug_is_an_internal_error_that_shows_no_details(
    client: Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(world.outside.networks, "attach", broken)
    with refused(grpc.StatusCode.INTERNAL, "virtshim failed in RunPodSandbox; its log has the details"):
        client.run()
    monkeypatch.undo()
    client.run()


# --- messages of every size


def test_a_list_of_many_mebibytes_passes(client: Client) -> None:
    big = {"example.com/big": "x" * (500 << 10)}
    sandboxes = [client.run(f"pod-{n}", annotations=big) for n in range(25)]
    assert dict(client.pod_status(sandboxes[0]).annotations) == big
    assert len(client.pods()) == 25  # 12 MiB


@pytest.mark.parametrize("char", ["n", "ü", "\U0001f600", "%"], ids=["ascii", "latin", "emoji", "percent"])
def test_an_error_about_a_very_long_name_arrives(client: Client, char: str) -> None:
    sandbox, metadata = client.run(), pb.ContainerMetadata(name=char * 4096)
    client.create(sandbox, metadata=metadata)
    with refused(grpc.StatusCode.ALREADY_EXISTS, "^container "):
        client.create(sandbox, metadata=metadata, labels={"an": "other"})


def test_an_error_about_very_many_faults_arrives(client: Client) -> None:
    sysctls = {f"some_{n}": "1" for n in range(1000)}
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "some_0"):
        client.run(linux=pb.LinuxPodSandboxConfig(sysctls=sysctls))
    devices = [pb.Device(host_path=f"dev/vfio/{n}") for n in range(1000)]
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "dev/vfio/0"):
        client.create(client.run(), devices=devices)


def test_an_error_with_line_breaks_and_control_characters_arrives(client: Client) -> None:
    with refused(grpc.StatusCode.NOT_FOUND, "no such container"):
        client.status("a\nb\x01\x7f")


# --- the socket


def test_only_its_owner_may_use_the_socket(tmp_path: Path) -> None:
    with served(tmp_path) as (_, _, path):
        assert oct(stat.S_IMODE(os.lstat(path).st_mode)) == "0o600"
        assert stat.S_ISSOCK(os.lstat(path).st_mode)


def test_a_socket_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    with served(tmp_path) as (world, _, path):
        os.rename(path, f"{path}.live")
        left = socket.socket(socket.AF_UNIX)
        left.bind(path)
        left.close()
        again = world.app.server(world.settings)
        again.start()
        second = Client(path)
        second.Version(pb.VersionRequest())
        second.channel.close()
        again.stop(0)


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    with served(tmp_path) as (world, _, path):
        in_the_way = Path(f"{path}.file")
        in_the_way.write_text("precious")
        settings = world.settings.model_copy(update={"cri": Cri(socket=str(in_the_way))})
        other = world.app.server(settings)
        with pytest.raises(WrongState, match="not a socket"):
            other.start()
        other.stop(0)
        assert in_the_way.read_text() == "precious"


def test_a_second_server_is_refused_with_the_holder_of_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    lock = SocketLock(path)
    with pytest.raises(WrongState, match=rf"pid {os.getpid()}\) serves"):
        SocketLock(path)
    lock.release()
    SocketLock(path).release()


def test_a_lock_that_cannot_be_created_is_reported_with_the_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WrongState, match=r"/file/run cannot be used: Not a directory; .*choose another path"):
        SocketLock(f"{tmp_path}/file/run/s")
    (tmp_path / "s.lock").mkdir()
    with pytest.raises(WrongState, match=r"/s\.lock cannot be used: Is a directory; move it away"):
        SocketLock(f"{tmp_path}/s")


def test_a_daemon_that_does_not_run_as_root_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("virtshim.system.grpc_socket.lock_file", denied)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionRefused, match=r"/s\.lock cannot be used: Permission denied; run this as root"):
        SocketLock(f"{tmp_path}/s")


def test_the_lock_is_private(tmp_path: Path) -> None:
    lock = SocketLock(str(tmp_path / "s"))
    assert oct(stat.S_IMODE((tmp_path / "s.lock").stat().st_mode)) == "0o600"
    lock.release()


def test_the_next_daemon_serves_the_pods_of_the_last_one(tmp_path: Path) -> None:
    with served(tmp_path) as (_, client, _):
        sandbox = client.run()
    with served(tmp_path) as (_, client, _):
        assert [(item.id, item.state) for item in client.pods()] == [(sandbox, pb.SANDBOX_NOTREADY)]


def test_containers_can_be_named_like_anything(client: Client, world: World) -> None:
    odd = "../../etc/$(reboot)\n;'\"é"
    sandbox = client.run()
    request = pb.CreateContainerRequest(
        pod_sandbox_id=sandbox, config=container(metadata=pb.ContainerMetadata(name=odd, attempt=2**32 - 1))
    )
    made = client.CreateContainer(request).container_id
    client.start(made)
    assert client.status(made).metadata.name == odd
    client.remove_pod(sandbox)
    assert world.everything() == []
