"""The VMs of `virtshim run -d` can be started, stopped, restarted and removed on the real server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.cri import Client
from fakes.world import IMAGE, World

from virtshim.cli.acting import screenshot
from virtshim.cli.logs import LogOptions, logs
from virtshim.cli.run import wanted_vm
from virtshim.cli.staying import remove, run_detached, start, stop
from virtshim.cri.client import NodeClient, VmSummary, WantedVm, connected
from virtshim.cri.operator_client import operating
from virtshim.cri.operator_server import OperatorServer
from virtshim.model.errors import InternalError, InvalidRequest, NotFound, WrongState

pytestmark = pytest.mark.cri


@dataclass(frozen=True)
class Operator:
    """A person at the node."""

    world: World
    node: NodeClient
    socket: str
    admin: str

    def run(self, name: str = "web", **more: str) -> str:
        wanted = wanted_vm(IMAGE, name, "64Mi", 0, [f"{key}={value}" for key, value in more.items()], ["A=b"])
        return run_detached(self.socket, self.admin, wanted, always_pull=False, quiet=True)

    def start(self, name: str = "web") -> str:
        return start(self.socket, name)

    def stop(self, name: str = "web") -> None:
        stop(self.socket, name, 5)

    def remove(self, name: str = "web", *, force: bool = False) -> None:
        remove(self.socket, self.admin, name, force=force)

    def vms(self) -> list[VmSummary]:
        return self.node.vms()

    def lasting(self) -> Sequence[str]:
        with operating(self.admin) as admin:
            return [vm.name for vm in admin.lasting_vms()]


@pytest.fixture
def operator(client: Client, world: World) -> Iterator[Operator]:
    socket = client.address.removeprefix("unix:")
    with tempfile.TemporaryDirectory(prefix="op-") as short, connected(socket) as node:
        server = OperatorServer(f"{short}/admin.sock", world.app.operator)
        server.start()
        yield Operator(world, node, socket, f"{short}/admin.sock")
        server.stop(0)


def test_a_vm_stays_until_it_is_removed_with_its_disk(operator: Operator) -> None:
    first = operator.run()
    assert [(vm.id, vm.state) for vm in operator.vms()] == [(first, "running")]
    operator.stop()
    operator.stop()
    assert [vm.state for vm in operator.vms()] == ["exited"]
    second = operator.start()
    assert operator.start() == second, "it runs already"
    assert [(vm.id, vm.state) for vm in operator.vms()] == [(second, "running")], "the former pod is removed"
    assert [pod.wanted for pod in operator.node.made_by_run()] == [
        WantedVm("web", IMAGE, "default", {"virtshim.io/vm": "web"}, (("A", "b"),), memory=64 << 20, stays=True)
    ]
    assert operator.lasting() == ["web"]
    with pytest.raises(WrongState, match="--force"):
        operator.remove()
    operator.remove(force=True)
    assert operator.node.pods() == []
    assert operator.lasting() == []


def test_a_vm_whose_guest_has_ended_starts_again(operator: Operator) -> None:
    first = operator.run()
    operator.node.stop_vm(first, 5)
    second = operator.start()
    assert [(vm.id, vm.state) for vm in operator.vms()] == [(second, "running")]


def test_a_name_is_taken_once(operator: Operator) -> None:
    operator.run()
    with pytest.raises(InvalidRequest, match="virtshim start web"):
        operator.run()
    assert len(operator.vms()) == 1


def test_a_vm_that_does_not_start_leaves_nothing(operator: Operator) -> None:
    with pytest.raises(InvalidRequest):
        operator.run(**{"virtshim.io/disk-bus": "none"})
    assert operator.node.pods() == []


def test_a_vm_that_is_made_and_does_not_start_leaves_no_disk(operator: Operator) -> None:
    operator.world.journal.fail("vms.start", InternalError("QEMU did not start"))
    with pytest.raises(InternalError, match="QEMU"):
        operator.run()
    assert (list(operator.node.pods()), operator.lasting()) == ([], [])


def test_the_disk_of_a_pods_vm_with_the_same_name_is_left_alone(client: Client, operator: Operator) -> None:
    sandbox = client.run("db-0", annotations={"virtshim.io/vm": "web"})
    client.start(client.create(sandbox, "database"))
    client.stop_pod(sandbox)
    operator.run()
    operator.remove(force=True)
    assert operator.lasting() == ["web"]


def test_a_kept_disk_of_the_same_vm_is_not_taken(client: Client, operator: Operator) -> None:
    sandbox = client.run("db-0", annotations={"virtshim.io/vm": "web"})
    client.start(client.create(sandbox, "vm"))
    client.stop_pod(sandbox)
    with pytest.raises(InvalidRequest, match="virtshim vms rm"):
        operator.run()


def test_a_start_that_fails_leaves_the_vm_stopped(operator: Operator) -> None:
    operator.run()
    operator.stop()
    operator.world.journal.fail("vms.start", InternalError("QEMU did not start"))
    with pytest.raises(InternalError, match="QEMU"):
        operator.start()
    assert len(operator.node.pods()) == 1
    operator.start()
    assert [vm.state for vm in operator.vms()] == ["running"]


@pytest.mark.parametrize("of_kubelet", [True, False])
def test_pods_that_run_did_not_make_are_left_alone(client: Client, operator: Operator, *, of_kubelet: bool) -> None:
    labels = {"virtshim.io/run": "x", "io.kubernetes.pod.uid": "1"} if of_kubelet else {}
    sandbox = client.run("web", labels=labels)
    client.create(sandbox)
    for act in (operator.start, operator.stop, operator.remove):
        with pytest.raises(WrongState, match="kubectl"):
            act()
    assert [pod.is_ready for pod in operator.node.pods()] == [True]


def test_the_name_of_the_vm_is_given_once(operator: Operator) -> None:
    with pytest.raises(InvalidRequest, match="--name"):
        operator.run(**{"virtshim.io/vm": "db"})


def test_its_console_is_shown_where_kubelet_would_keep_a_log(operator: Operator) -> None:
    operator.run()
    with pytest.raises(WrongState, match="`virtshim console` to see its console"):
        logs(operator.socket, "web", LogOptions())


def test_a_picture_of_its_screen_has_its_name(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator.run(**{"virtshim.io/vnc": "true"})
    monkeypatch.chdir(tmp_path)
    screenshot(operator.socket, operator.admin, "web", "")
    assert capsys.readouterr().out.endswith(f"{tmp_path}/web.png\n")
    assert (tmp_path / "web.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_name_is_not_found(operator: Operator) -> None:
    for act in (operator.start, operator.stop, operator.remove):
        with pytest.raises(NotFound, match="virtshim ps"):
            act()
