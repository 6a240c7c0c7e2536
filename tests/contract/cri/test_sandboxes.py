"""Pod sandboxes are made, listed, stopped and removed over the wire."""

import json
from typing import Any

import grpc
import pytest
from fakes.background import Background
from fakes.cri import Client, container, pod, refused
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import InternalError, Unavailable

pytestmark = pytest.mark.cri

LABELS = {"io.kubernetes.pod.name": "web", "app": "db", "π": "ünï\n", "": ""}
ANNOTATIONS = {
    "kubernetes.io/config.seen": "2026-01-01T00:00:00Z",
    "VirtletCloudInitUserData": "a: |\r\n  b\n\n",
    "x": "\t\0'\"",
}
INVALID, NOT_FOUND, TAKEN = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
)
NODE = pb.NamespaceMode.Value("NODE")


def linux(**options: Any) -> pb.LinuxPodSandboxConfig:
    context = pb.LinuxSandboxSecurityContext(namespace_options=pb.NamespaceOption(**options))
    return pb.LinuxPodSandboxConfig(security_context=context)


# --- life


def test_a_sandbox_is_ready_then_not_ready_then_removed(client: Client, world: World) -> None:
    sandbox = client.run()
    assert client.pod_status(sandbox).state == pb.SANDBOX_READY
    client.stop_pod(sandbox)
    assert client.pod_status(sandbox).state == pb.SANDBOX_NOTREADY
    client.remove_pod(sandbox)
    assert client.pods() == []
    with refused(NOT_FOUND):
        client.pod_status(sandbox)
    assert world.everything() == []


def test_status_has_everything_that_kubelet_reads(client: Client) -> None:
    config = pod(labels=LABELS, annotations=ANNOTATIONS)
    request = pb.RunPodSandboxRequest(config=config, runtime_handler="virtshim")
    sandbox = client.RunPodSandbox(request).pod_sandbox_id
    status = client.pod_status(sandbox)
    assert status.id == sandbox
    assert status.metadata == config.metadata
    assert status.network == pb.PodSandboxNetworkStatus(ip="10.88.0.2", additional_ips=[pb.PodIP(ip="fd00::5")])
    assert status.linux.namespaces.options.network == pb.NamespaceMode.Value("POD")
    assert (dict(status.labels), dict(status.annotations)) == (LABELS, ANNOTATIONS)
    assert status.runtime_handler == "virtshim"
    assert status.created_at > 0


def test_the_list_agrees_with_the_status(client: Client) -> None:
    sandbox = client.run(labels=LABELS, annotations=ANNOTATIONS)
    status = client.pod_status(sandbox)
    (item,) = client.pods()
    for field in ("id", "metadata", "state", "created_at", "labels", "annotations", "runtime_handler"):
        assert getattr(item, field) == getattr(status, field), field


def test_creation_times_increase_strictly_and_never_change(client: Client, world: World) -> None:
    made = [client.run(f"pod-{n}") for n in range(5)]
    created = [client.pod_status(sandbox).created_at for sandbox in made]
    assert created == sorted(set(created))
    world.outside.clock.advance(100)
    client.stop_pod(made[0])
    assert [item.created_at for item in client.pods()] == created


def test_verbose_status_carries_json_without_secrets(client: Client) -> None:
    sandbox = client.run()
    request = pb.PodSandboxStatusRequest(pod_sandbox_id=sandbox, verbose=True)
    info = client.PodSandboxStatus(request).info["info"]
    assert json.loads(info)["interfaces"][0]["name"] == "eth0"
    assert "key-of" not in info
    assert not client.PodSandboxStatus(pb.PodSandboxStatusRequest(pod_sandbox_id=sandbox)).info


# --- what is refused


def test_a_config_without_metadata_is_refused(client: Client) -> None:
    with refused(INVALID, "config is missing"):
        client.RunPodSandbox(pb.RunPodSandboxRequest())
    with refused(INVALID, "metadata is missing"):
        client.RunPodSandbox(pb.RunPodSandboxRequest(config=pb.PodSandboxConfig()))


@pytest.mark.parametrize("field", ["name", "namespace", "uid"])
def test_each_empty_field_of_metadata_is_named(client: Client, field: str) -> None:
    metadata = pod().metadata
    metadata.ClearField(field)
    with refused(INVALID, rf"metadata\.{field} is empty"):
        client.run(metadata=metadata)


def test_one_error_names_all_empty_fields(client: Client) -> None:
    with refused(INVALID, "name is empty; .*namespace is empty; .*uid is empty"):
        client.run(metadata=pb.PodSandboxMetadata())


@pytest.mark.parametrize("text", ["a\0b", "x" * 4097])
def test_a_pod_name_that_cni_plugins_cannot_take_is_refused(client: Client, text: str) -> None:
    with refused(INVALID, "config.metadata.name .*1 to 253 letters"):
        client.run(metadata=pb.PodSandboxMetadata(name=text, namespace="default", uid="u"))


@pytest.mark.parametrize(("field", "in_pod"), [("network", "hostNetwork"), ("pid", "hostPID"), ("ipc", "hostIPC")])
def test_a_namespace_of_the_host_is_refused_with_the_field_of_the_pod(client: Client, field: str, in_pod: str) -> None:
    with refused(INVALID, f"namespace_options.{field} is NODE.*remove {in_pod}"):
        client.run(linux=linux(**{field: NODE}))


def test_user_namespaces_are_refused(client: Client) -> None:
    users = pb.UserNamespace(
        mode=pb.NamespaceMode.Value("POD"), uids=[pb.IDMapping(host_id=1, container_id=0, length=1)]
    )
    with refused(INVALID, "hostUsers"):
        client.run(linux=linux(userns_options=users))


def test_the_usual_namespaces_of_a_pod_are_accepted(client: Client) -> None:
    mode = pb.NamespaceMode.Value
    client.run(
        linux=linux(
            network=mode("POD"), pid=mode("CONTAINER"), ipc=mode("POD"), userns_options=pb.UserNamespace(mode=NODE)
        )
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"linux": pb.LinuxPodSandboxConfig(sysctls={"somaxconn": "1"})}, "somaxconn"),
        ({"log_directory": "relative/path"}, "log_directory is not absolute"),
        ({"log_directory": "/nul\0"}, "log_directory contains a NUL"),
        ({"log_directory": "/" + "x" * 256}, "log_directory: a path has at most"),
        ({"log_directory": "/x" * 2048}, "log_directory: a path has at most"),
        ({"labels": {"name": "x" * (512 << 10)}}, "labels and config.annotations hold 524292 bytes"),
        ({"port_mappings": [pb.PortMapping(container_port=70000)]}, "70000 is not a port"),
        ({"port_mappings": [pb.PortMapping(container_port=1, host_port=-1)]}, "-1 is not a port"),
        ({"port_mappings": [pb.PortMapping(container_port=1, protocol=9)]}, "protocol 9 is unknown"),
    ],
)
def test_settings_that_a_vm_cannot_honour_are_refused(client: Client, changes: dict[str, Any], says: str) -> None:
    with refused(INVALID, says):
        client.run(**changes)
    assert client.pods() == []


def test_one_error_names_all_faults_of_a_sandbox_config(client: Client) -> None:
    config = linux(network=NODE, pid=NODE)
    config.sysctls["a-b"] = "1"
    with refused(INVALID, "network is NODE.*pid is NODE.*a-b.*log_directory"):
        client.run(linux=config, log_directory="x")


def test_one_error_names_all_bad_annotations(client: Client, world: World) -> None:
    bad = {"VirtletVCPUCount": "many", "VirtletDiskDriver": "floppy", "VirtletSystemUUID": "1", "VirtletTypo": "x"}
    with refused(INVALID) as message:
        client.run(annotations=bad | {"example.com/other": "fine"})
    for name in bad:
        assert name in message[0]
    assert world.everything() == []


def test_an_unknown_runtime_handler_is_refused(client: Client) -> None:
    with refused(INVALID, "'kata' is not known.*known: virtshim"):
        client.run(handler="kata")


# --- repeats


def test_a_repeat_returns_the_first_id(client: Client) -> None:
    assert client.run() == client.run()
    assert len(client.pods()) == 1


def test_a_taken_name_with_a_different_config_is_refused(client: Client) -> None:
    first = client.run()
    with refused(TAKEN, first):
        client.run(hostname="other")
    assert len(client.pods()) == 1


def test_the_next_attempt_may_overlap_with_the_last(client: Client) -> None:
    old = client.run()
    client.stop_pod(old)
    new = client.run("web", 1)
    assert {item.id: item.metadata.attempt for item in client.pods()} == {old: 0, new: 1}


def test_a_repeat_after_the_clients_deadline_gets_the_first_calls_sandbox(client: Client, world: World) -> None:
    gate = world.journal.hold("networks.attach")
    request = pb.RunPodSandboxRequest(config=pod())
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        client.RunPodSandbox(request, timeout=0.2)
    gate.wait()
    assert client.pods() == []  # half-made things are not shown
    repeat = Background(lambda: client.RunPodSandbox(request).pod_sandbox_id)
    gate.open()
    sandbox = repeat.done()
    assert [item.id for item in client.pods()] == [sandbox]
    assert world.journal.count("networks.attach") == 1


def test_lists_and_status_answer_while_a_pod_starts_slowly(client: Client, world: World) -> None:
    gate = world.journal.hold("networks.attach")
    slow = Background(client.run)
    gate.wait()
    client.Status(pb.StatusRequest())
    other = client.run("other")
    assert [item.id for item in client.pods()] == [other]
    gate.open()
    slow.done()


# --- stop and remove


def test_removing_a_running_pod_removes_everything(client: Client, world: World) -> None:
    sandbox, _ = client.running()
    client.remove_pod(sandbox)
    assert (client.pods(), client.containers(), world.everything()) == ([], [], [])


def test_stopping_a_pod_ends_its_containers_and_keeps_them_listed(client: Client) -> None:
    sandbox, made = client.running()
    client.stop_pod(sandbox)
    assert client.status(made).state == pb.CONTAINER_EXITED


def test_parallel_stops_and_removals_all_succeed(client: Client, world: World) -> None:
    sandbox, made = client.running()
    calls = [
        Background(call)
        for call in [lambda: client.stop_pod(sandbox), lambda: client.remove_pod(sandbox), lambda: client.remove(made)]
        * 4
    ]
    for call in calls:
        call.done()
    assert world.everything() == []


# --- ids and filters


def test_filters_narrow_the_list_and_all_must_match(client: Client) -> None:
    one = client.run("one", labels={"app": "db", "tier": "back"})
    two = client.run("two", labels={"app": "db", "tier": "front"})
    client.stop_pod(two)
    ready, not_ready = (pb.PodSandboxStateValue(state=state) for state in (pb.SANDBOX_READY, pb.SANDBOX_NOTREADY))

    def listed(**wanted: Any) -> list[str]:
        return [item.id for item in client.pods(**wanted)]

    assert listed() == [one, two]
    assert listed(id=one) == listed(id=one[:20]) == listed(state=ready) == [one]
    assert listed(state=not_ready) == [two]
    assert listed(label_selector={"app": "db"}) == [one, two]
    assert listed(label_selector={"app": "db", "tier": "front"}) == [two]
    assert listed(label_selector={"app": "d"}) == listed(label_selector={"app": "db", "colour": ""}) == []
    assert listed(id=one, state=not_ready) == listed(state=ready, label_selector={"tier": "front"}) == []
    assert listed(id="nonsense") == []


def test_unknown_fields_of_a_newer_kubelet_are_ignored(client: Client) -> None:
    newer = pb.RunPodSandboxRequest(config=pod()).SerializeToString() + b"\xf2\x3f\x03new"
    call = client.channel.unary_unary(
        "/runtime.v1.RuntimeService/RunPodSandbox", response_deserializer=pb.RunPodSandboxResponse.FromString
    )
    assert call(newer, timeout=20).pod_sandbox_id == client.run()


# --- failures leave nothing, or something that can be finished


def test_a_failed_network_leaves_nothing_and_its_error_reaches_kubelet(client: Client, world: World) -> None:
    world.journal.fail(
        "networks.attach", InternalError("CNI plugin bridge: no free address in 10.88.0.0/16"), after=True
    )
    with refused(grpc.StatusCode.INTERNAL, "no free address"):
        client.run()
    assert (client.pods(), world.everything()) == ([], [])


def test_kubelet_can_finish_a_network_that_could_neither_be_made_nor_released(client: Client, world: World) -> None:
    world.journal.fail("networks.attach", InternalError("CNI ADD failed"), after=True)
    world.journal.fail("networks.release", Unavailable("tapmanager is gone"), times=2)
    with refused(grpc.StatusCode.INTERNAL, "CNI ADD failed"):
        client.run()
    (left,) = client.pods()
    assert left.state == pb.SANDBOX_NOTREADY
    assert client.pod_status(left.id).network.ip == ""
    with refused(grpc.StatusCode.UNAVAILABLE, "tapmanager is gone"):
        client.stop_pod(left.id)
    client.stop_pod(left.id)
    client.remove_pod(left.id)
    assert (client.pods(), world.everything()) == ([], [])


def test_a_container_cannot_be_created_in_a_stopped_sandbox(client: Client) -> None:
    sandbox = client.run()
    client.stop_pod(sandbox)
    request = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=container())
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "not ready"):
        client.CreateContainer(request)


@pytest.mark.parametrize("pid", ["POD", "CONTAINER"])
def test_the_namespaces_are_shown_as_the_pod_asked_for_them(client: Client, pid: str) -> None:
    asked = pb.NamespaceOption(pid=pb.NamespaceMode.Value(pid), ipc=pb.NamespaceMode.Value("POD"))
    context = pb.LinuxSandboxSecurityContext(namespace_options=asked)
    made = client.run(linux=pb.LinuxPodSandboxConfig(security_context=context))
    assert client.pod_status(made).linux.namespaces.options == asked
