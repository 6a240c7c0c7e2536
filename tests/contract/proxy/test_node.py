"""What kubelet hears about the node."""

import json
from pathlib import Path

import grpc
import pytest
from fakes.cri import Client, refused
from fakes.proxy import Proxy
from fakes.runtime import FakeRuntime, Refusal

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.proxy


def driver(value: int) -> bytes:
    linux = pb.LinuxRuntimeConfiguration(cgroup_driver=pb.CgroupDriver.Name(value))
    return pb.RuntimeConfigResponse(linux=linux).SerializeToString()


def test_the_version_is_the_primarys(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    assert client.Version(pb.VersionRequest()).runtime_name == "primary"
    assert not other.calls


def test_the_others_conditions_are_beside_the_nodes(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    theirs = pb.StatusResponse()
    theirs.status.conditions.add(type="RuntimeReady", status=False, reason="NoLibvirt", message="libvirt is away")
    other.answers["Status"] = theirs.SerializeToString()
    conditions = client.Status(pb.StatusRequest()).status.conditions
    assert [(one.type, one.status, one.reason) for one in conditions] == [
        ("RuntimeReady", True, ""), ("NetworkReady", True, ""), ("other/RuntimeReady", False, "NoLibvirt"),
    ]  # fmt: skip


def test_handlers_of_all_are_listed_with_their_features(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    status = client.Status(pb.StatusRequest(verbose=True))
    assert [one.name for one in status.runtime_handlers] == ["", "of-primary", "vm", "of-other"]
    told = json.loads(status.info["proxy"])
    assert told["handlers"] == {"": "primary", "of-primary": "primary", "vm": "other", "of-other": "other"}
    assert [one["up"] for one in told["runtimes"]] == [True, True]


def test_the_primarys_error_is_the_nodes(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    primary.answers["Status"] = Refusal(grpc.StatusCode.INTERNAL, "broken")
    with refused(grpc.StatusCode.INTERNAL, "^broken$"):
        client.Status(pb.StatusRequest())


def test_the_runtime_configuration_is_the_primarys(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    answer = client.RuntimeConfig(pb.RuntimeConfigRequest())
    assert answer.linux.cgroup_driver == pb.CGROUPFS
    primary.answers["RuntimeConfig"] = Refusal(grpc.StatusCode.UNIMPLEMENTED, "an old runtime")
    with refused(grpc.StatusCode.UNIMPLEMENTED, "an old runtime"):
        client.RuntimeConfig(pb.RuntimeConfigRequest())


def test_two_cgroup_drivers_are_refused(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    primary.answers["RuntimeConfig"], other.answers["RuntimeConfig"] = driver(pb.SYSTEMD), driver(pb.CGROUPFS)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "primary: systemd, other: cgroupfs.; set them to the same one"):
        client.RuntimeConfig(pb.RuntimeConfigRequest())


def test_the_proxy_does_not_start_with_two_cgroup_drivers(
    directory: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.answers["RuntimeConfig"], other.answers["RuntimeConfig"] = driver(pb.SYSTEMD), driver(pb.CGROUPFS)
    (directory / "second").mkdir()
    proxy = Proxy(directory / "second", primary.socket, other.socket)
    assert not proxy.is_ready(proxy.launch())
    assert proxy.stop() == 75
    assert "primary: systemd, other: cgroupfs" in proxy.log.read_text()


def test_a_new_configuration_reaches_all(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    config = pb.RuntimeConfig(network_config=pb.NetworkConfig(pod_cidr="10.1.0.0/24"))
    request = pb.UpdateRuntimeConfigRequest(runtime_config=config)
    client.UpdateRuntimeConfig(request)
    primary.answers["UpdateRuntimeConfig"] = Refusal(grpc.StatusCode.INTERNAL, "cannot write")
    with refused(grpc.StatusCode.INTERNAL, "cannot write"):
        client.UpdateRuntimeConfig(request)
    assert [one.request for one in other.asked("UpdateRuntimeConfig")] == [request.SerializeToString()] * 2
