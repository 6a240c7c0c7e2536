"""The operators' calls work over the real admin socket, for root only."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fakes.cri import CALL_SECONDS, Client, refused
from fakes.world import IMAGE, World
from podclient import wait_until

from criproto.operator_v1 import operator_pb2 as pb
from criproto.operator_v1 import operator_pb2_grpc
from criproto.runtime_v1 import api_pb2
from virtshim.cli.vms import remove, vms
from virtshim.cluster.node_words import conditions
from virtshim.cluster.values import ARRIVED, MOVABLE, PAUSED, PodSeen, Said
from virtshim.cri.operator_client import operating
from virtshim.cri.operator_server import OperatorServer
from virtshim.guest.operation import Action
from virtshim.model.errors import ResourceExhausted, WrongState

pytestmark = pytest.mark.cri

Code = grpc.StatusCode


class Operator:
    """`operator.Pause("id")` and the like; a request is sent as it is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.channel = grpc.insecure_channel(f"unix:{path}")
        self.stub = operator_pb2_grpc.OperatorStub(self.channel)

    def __getattr__(self, name):
        call = getattr(self.stub, name)

        def made(request=None, **fields):
            request = pb.VmRequest(id=request) if isinstance(request, str) else request
            return call(request, timeout=CALL_SECONDS)

        return made


@pytest.fixture
def operator(world: World) -> Iterator[Operator]:
    with tempfile.TemporaryDirectory(prefix="op-") as short:
        server = OperatorServer(f"{short}/admin.sock", world.app.operator)
        server.start()
        client = Operator(f"{short}/admin.sock")
        yield client
        client.channel.close()
        server.stop(0)
        assert not os.path.exists(client.path)


def test_startup_phases_are_reported_by_pod_and_for_all_pods(operator: Operator, client: Client, world: World) -> None:
    first, made = client.running("web")
    second = client.run("db")
    told = operator.StartUps(pb.StartUpsRequest()).start_ups
    assert [one.pod_sandbox_id for one in told] == [first, second]
    for name in (first, made):
        (one,) = operator.StartUps(pb.StartUpsRequest(id=name)).start_ups
        phases = {phase.name: phase for phase in one.phases}
        assert {"sandbox", "network", "create", "disk", "start", "libvirt", "firmware"} <= phases.keys()
        assert phases["network"].is_over
        assert phases["network"].began_at == world.outside.clock.now_ns()
        assert (phases["firmware"].container_id, phases["firmware"].is_over) == (made, False)
    with refused(Code.NOT_FOUND, "virtshim ps"):
        operator.StartUps(pb.StartUpsRequest(id="f" * 64))


def test_a_pull_in_progress_is_shown_with_its_bytes(operator: Operator, client: Client, world: World) -> None:
    assert not operator.Pulls(pb.PullsRequest()).pulls
    world.outside.files.stalled = True
    pull = client.image.PullImage.future(_pull())
    wait_until(lambda: len(operator.Pulls(pb.PullsRequest()).pulls) == 1, 20, "the pull is listed")
    (one,) = operator.Pulls(pb.PullsRequest()).pulls
    assert (one.image, one.received, one.total) == (IMAGE, 3, 10)
    pull.cancel()
    assert world.outside.files.gave_up.wait(20)


def load(operator: Operator, *requests: pb.LoadImageRequest) -> str:
    return operator.LoadImage(iter(requests)).id


def image_named(client: Client, name: str) -> api_pb2.Image:
    return client.image.ImageStatus(api_pb2.ImageStatusRequest(image={"image": name})).image


def test_a_disk_that_is_sent_is_an_image_for_pods(operator: Operator, client: Client) -> None:
    disk = [
        pb.LoadImageRequest(name="golden:1", total=4),
        pb.LoadImageRequest(data=b"di"),
        pb.LoadImageRequest(data=b"sk"),
    ]
    made = load(operator, *disk, pb.LoadImageRequest(is_last=True))
    found = image_named(client, "golden:1")
    assert (found.id, list(found.repo_tags), found.size) == (made, ["golden:1"], 4)
    newer = load(operator, pb.LoadImageRequest(name="golden:1", data=b"newer", is_last=True))
    assert image_named(client, "golden:1").id == newer != made


def test_a_disk_whose_stream_ends_early_is_no_image(operator: Operator, client: Client) -> None:
    with refused(Code.INVALID_ARGUMENT, "before its last message"):
        load(operator, pb.LoadImageRequest(name="golden:1", data=b"half"))
    with refused(Code.INVALID_ARGUMENT, "the image reference is empty"):
        load(operator)
    assert not image_named(client, "golden:1").id


def _pull():
    return api_pb2.PullImageRequest(image=api_pb2.ImageSpec(image=IMAGE))


def test_inspect_shows_a_pod_without_its_secrets(operator: Operator, client: Client, world: World) -> None:
    sandbox = client.run("web")
    made = client.create(sandbox, envs=[{"key": "PASSWORD", "value": b"hunter2"}])
    client.start(made)
    for name in (sandbox, made[:12]):
        text = operator.Inspect(pb.InspectRequest(id=name)).json
        facts = json.loads(text)
        assert (facts["pod"]["name"], facts["container"]["id"], facts["vm"]["power"]) == ("web", made, "running")
        assert facts["addresses"] == ["10.88.0.2", "fd00::5"]
        assert facts["pod"]["netns"]
        assert "network" in [phase["name"] for phase in facts["phases"]]
        assert "hunter2" not in text
        assert world.records.sandboxes.all()[0].network.fetch_key not in text
    empty = client.run("empty")
    assert json.loads(operator.Inspect(pb.InspectRequest(id=empty)).json)["container"] is None


def test_inspect_lacks_only_libvirts_part_if_libvirt_is_unreachable(
    operator: Operator, client: Client, world: World
) -> None:
    sandbox, _ = client.running()
    world.outside.vms.why_not = "libvirt is away"
    facts = json.loads(operator.Inspect(pb.InspectRequest(id=sandbox)).json)
    world.outside.vms.why_not = ""
    assert "libvirt is away" in facts["vm"]["error"]
    assert facts["pod"]["name"] == "web"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_only_root_can_connect_to_the_admin_socket(operator: Operator) -> None:
    found = os.stat(operator.path)
    assert (found.st_mode & 0o777, found.st_uid) == (0o600, 0)
    os.chmod(os.path.dirname(operator.path), 0o711)
    asks = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    argv = ["/usr/bin/python3", "-IS", "-c", asks, operator.path]
    stranger = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *argv]
    refusal = subprocess.run(stranger, capture_output=True, text=True, check=False, timeout=60)
    assert "PermissionError" in refusal.stderr
    subprocess.run(argv, check=True, timeout=60)


def test_a_socket_that_a_killed_daemon_left_is_replaced(world: World) -> None:
    with tempfile.TemporaryDirectory(prefix="op-") as short:
        left = f"{short}/admin.sock"
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(left)
        os.chmod(left, 0o666)
        server = OperatorServer(left, world.app.operator)
        server.start()
        client = Operator(left)
        assert client.StartUps(pb.StartUpsRequest()) is not None
        assert os.stat(left).st_mode & 0o777 == 0o600
        client.channel.close()
        server.stop(0)


def test_a_file_that_is_not_a_socket_is_not_replaced(world: World, tmp_path: Path) -> None:
    (tmp_path / "admin.sock").write_text("mine")
    server = OperatorServer(str(tmp_path / "admin.sock"), world.app.operator)
    with pytest.raises(WrongState, match="not a socket"):
        server.start()
    server.stop(0)
    assert (tmp_path / "admin.sock").read_text() == "mine"


def test_a_silent_client_does_not_block_others(operator: Operator) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(operator.path)
        assert operator.StartUps(pb.StartUpsRequest()) is not None


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """By a command, without the log of the server, which is in the same process."""
    lines = capsys.readouterr().out.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"\d{4}-\d\d-\d\d ", line))


LASTING = {"virtshim.io/vm": "db", "virtshim.io/on-stop": "save"}


def test_vms_that_outlive_their_pods_are_listed_saved_and_removed(
    operator: Operator, client: Client, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    sandbox = client.run("db-0", annotations=LASTING)
    made = client.create(sandbox)
    client.start(made)
    (known,) = operator.Vms(pb.VmsRequest()).vms
    assert (known.namespace, known.name, known.container) == ("default", "db", "vm")
    assert (known.container_id, known.pod_sandbox_id) == (made, sandbox)
    assert (known.pod_namespace, known.pod, known.HasField("saved")) == ("default", "db-0", False)
    own = pb.RemoveVmRequest(namespace="default", name="db", container="vm")
    with refused(Code.FAILED_PRECONDITION, "is used by pod default/db-0"):
        operator.RemoveVm(own)

    assert operator.Save(sandbox).changed
    status = client.ContainerStatus(api_pb2.ContainerStatusRequest(container_id=made)).status
    assert (status.exit_code, status.reason) == (143, "Saved")
    vms(operator.path, operator.path, as_json=True)
    (shown,) = json.loads(printed(capsys))
    now = world.outside.clock.now_ns() / 1e9
    assert shown["saved"] == {
        "size": world.app.adapters.files.vms.all()[0].saved.bytes,
        "savedAt": pytest.approx(now, abs=5),
        "lapsesAt": pytest.approx(now + 86400, abs=5),
        "taken": False,
    }
    assert (shown["namespace"], shown["name"], shown["container"], shown["pod"]) == ("default", "db", "vm", "")
    with refused(Code.FAILED_PRECONDITION, "only a running VM"):
        operator.Save(sandbox)

    remove(operator.path, operator.path, "default/db", as_json=False)
    assert printed(capsys) == "default/db/vm: removed, with its disk and its saved memory\n"
    assert not operator.Vms(pb.VmsRequest()).vms
    with refused(Code.NOT_FOUND, "virtshim vms"):
        operator.RemoveVm(own)


def test_a_save_through_the_commands_client_names_what_is_in_the_way(operator: Operator, client: Client) -> None:
    _, made = client.running()
    with operating(operator.path) as node, pytest.raises(WrongState, match=r"annotation virtshim\.io/vm"):
        node.act(Action.SAVE, made)


def test_a_vm_is_renewed_through_the_commands_client(operator: Operator, client: Client, world: World) -> None:
    sandbox = client.run("db-0", annotations=LASTING)
    made = client.create(sandbox)
    client.start(made)
    with operating(operator.path) as node:
        assert node.act(Action.RENEW, made) == (True, "its guest continues in a new QEMU")
    assert len(world.outside.vms.restored) == 1
    assert (
        client.ContainerStatus(api_pb2.ContainerStatusRequest(container_id=made)).status.state
        == api_pb2.CONTAINER_RUNNING
    )


def test_all_vms_whose_stops_save_are_saved_at_once(operator: Operator, client: Client, world: World) -> None:
    made = {}
    for name, asked in (("a-0", LASTING), ("b-0", LASTING), ("c-0", {"virtshim.io/vm": "c"}), ("d-0", {})):
        own = asked | ({"virtshim.io/vm": name} if asked == LASTING else {})
        made[name] = client.create(client.run(name, annotations=own))
        client.start(made[name])
    world.journal.fail("saved_vms.flush", ResourceExhausted("the disk is full"))
    with operating(operator.path) as node:
        saved = node.save_all(30)
    assert sorted(saved) == ["default/a-0/vm", "default/b-0/vm"]
    assert sorted(saved.values()) == ["", "the disk is full"]
    states = [client.ContainerStatus(api_pb2.ContainerStatusRequest(container_id=one)).status for one in made.values()]
    assert sorted(one.reason for one in states) == ["", "", "", "Saved"]


def test_saving_all_wants_a_time(operator: Operator) -> None:
    with refused(Code.INVALID_ARGUMENT, "seconds: must be at least 1"):
        operator.SaveAll(pb.SaveAllRequest())


def said_by_agent(operator: Operator, made: str, **pod: object) -> dict[str, Said]:
    """What an agent of the cluster reads in the answers of this node."""
    with operating(operator.path) as client:
        (vm,) = [one for one in client.lasting_vms() if one.vm_id == made]
        facts = client.inspect(vm.vm_id)
    return dict(conditions(PodSeen("db-0", "uid", "1", **pod), vm, facts))  # type: ignore[arg-type]


def test_an_agent_reads_whether_a_virtual_machine_runs_is_paused_and_can_move(
    operator: Operator, client: Client
) -> None:
    _, made = client.running("db-0", annotations=LASTING)
    assert said_by_agent(operator, made) == {MOVABLE: Said(True, "Movable")}
    assert said_by_agent(operator, made, restore_from="n2")[ARRIVED] == Said(True, "Arrived")
    operator.Pause(made)
    paused = said_by_agent(operator, made)
    assert (paused[PAUSED].is_true, paused[PAUSED].reason, paused[MOVABLE].reason) == (True, "Operator", "NotRunning")
    operator.Resume(made)
    assert said_by_agent(operator, made)[MOVABLE].is_true


def test_an_agent_reads_that_empty_disks_keep_a_virtual_machine_from_moving(operator: Operator, client: Client) -> None:
    own = {"virtshim.io/vm": "db", "virtshim.io/disks": "data: {size: 16Mi}"}
    _, made = client.running("db-0", annotations=own)
    assert said_by_agent(operator, made)[MOVABLE].reason == "EmptyDisks"
