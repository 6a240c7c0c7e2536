"""The proxy answers kubelet's calls about the node for all runtimes together."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from fakes.cri import Client, refused
from fakes.journal import WAIT_LIMIT
from fakes.proxy import Proxy
from fakes.runtime import FakeRuntime, Refusal
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.proxy


def driver(value: int) -> bytes:
    linux = pb.LinuxRuntimeConfiguration(cgroup_driver=pb.CgroupDriver.Name(value))
    return pb.RuntimeConfigResponse(linux=linux).SerializeToString()


def not_before(over: threading.Event) -> Callable[..., bytes]:
    """An empty answer that comes late."""

    def answer(*_: object) -> bytes:
        assert over.wait(WAIT_LIMIT)
        return b""

    return answer


def test_the_version_is_the_primarys(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    assert client.Version(pb.VersionRequest()).runtime_name == "primary"


def test_conditions_of_the_other_runtime_are_beside_the_nodes_conditions(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
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


@pytest.mark.parametrize(
    "ask",
    [lambda client: client.Status(pb.StatusRequest()), lambda client: client.RuntimeConfig(pb.RuntimeConfigRequest())],
    ids=["Status", "RuntimeConfig"],
)
def test_a_runtime_with_a_slow_status_does_not_count_as_down(
    proxy: Proxy, client: Client, primary: FakeRuntime, other: FakeRuntime, ask: Callable[[Client], object]
) -> None:
    """Its pods would be refused or reported as NOTREADY, although a list may take longer than a status."""
    theirs, over, before = other.add_pod(), threading.Event(), len(proxy.events())
    other.answers["Status"] = other.answers["RuntimeConfig"] = not_before(over)
    try:
        ask(client)
    finally:
        over.set()
    assert client.pod_status(theirs).id == theirs
    assert [pod.id for pod in client.pods()] == [theirs]
    assert not [one for one in proxy.events()[before:] if one["event"] == "proxy.runtime.down"]


def test_the_status_shows_a_runtime_that_does_not_answer_in_time(
    client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    over = threading.Event()
    other.answers["Status"] = not_before(over)
    try:
        conditions = client.Status(pb.StatusRequest()).status.conditions
    finally:
        over.set()
    told = [(one.type, one.status, one.reason, one.message) for one in conditions][2:]
    why = f"the runtime other at {other.socket} is not available: no answer within 2.0 s"
    assert told == [("other/RuntimeReady", False, "Unavailable", why)]


def test_the_runtime_configuration_is_the_primarys(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    answer = client.RuntimeConfig(pb.RuntimeConfigRequest())
    assert answer.linux.cgroup_driver == pb.CGROUPFS
    primary.answers["RuntimeConfig"] = Refusal(grpc.StatusCode.UNIMPLEMENTED, "an old runtime")
    with refused(grpc.StatusCode.UNIMPLEMENTED, "an old runtime"):
        client.RuntimeConfig(pb.RuntimeConfigRequest())


def test_different_cgroup_drivers_are_refused(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    primary.answers["RuntimeConfig"], other.answers["RuntimeConfig"] = driver(pb.SYSTEMD), driver(pb.CGROUPFS)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "primary: systemd, other: cgroupfs.; set them to the same one"):
        client.RuntimeConfig(pb.RuntimeConfigRequest())


def test_the_proxy_does_not_start_with_different_cgroup_drivers(
    directory: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    primary.answers["RuntimeConfig"], other.answers["RuntimeConfig"] = driver(pb.SYSTEMD), driver(pb.CGROUPFS)
    (directory / "second").mkdir()
    proxy = Proxy(directory / "second", primary.socket, other.socket)
    assert not proxy.is_ready(proxy.launch())
    assert proxy.stop() == 75
    assert "primary: systemd, other: cgroupfs" in proxy.log.read_text()


def test_the_proxy_reads_its_settings_again_at_sighup(
    directory: Path, primary: FakeRuntime, other: FakeRuntime
) -> None:
    (directory / "third").mkdir()
    drop_in = directory / "third/config.toml.d/10.toml"
    drop_in.parent.mkdir()

    def events(name: str) -> list[dict[str, object]]:
        return [one for one in proxy.events() if one["event"] == name]

    with Proxy(directory / "third", primary.socket, other.socket) as proxy:
        assert proxy.process is not None
        for content, event in (
            ('[log]\nlevel = "debug"\n[proxy]\nmax_calls = 64\n', "settings.need_restart"),
            ("[log]\nlevel = 3\n", "settings.refused"),
        ):
            drop_in.write_text(content)
            proxy.process.send_signal(signal.SIGHUP)
            wait_until(lambda event=event: events(event), 60, event)
        assert [one["changed"] for one in events("settings.reloaded")] == [["log.level"]]
        assert [one["settings"] for one in events("settings.need_restart")] == [["proxy.max_calls"]]
        assert f"{drop_in}:2: log.level" in str(events("settings.refused")[0]["faults"])
        assert proxy.client.Version(pb.VersionRequest()).runtime_name == "primary"


def test_a_new_configuration_reaches_all_runtimes(client: Client, primary: FakeRuntime, other: FakeRuntime) -> None:
    config = pb.RuntimeConfig(network_config=pb.NetworkConfig(pod_cidr="10.1.0.0/24"))
    request = pb.UpdateRuntimeConfigRequest(runtime_config=config)
    client.UpdateRuntimeConfig(request)
    primary.answers["UpdateRuntimeConfig"] = Refusal(grpc.StatusCode.INTERNAL, "cannot write")
    with refused(grpc.StatusCode.INTERNAL, "cannot write"):
        client.UpdateRuntimeConfig(request)
    assert [one.request for one in other.asked("UpdateRuntimeConfig")] == [request.SerializeToString()] * 2
