"""The commands for people can read the real server through their CRI client."""

import pytest
from fakes.cri import Client
from fakes.world import World

from virtshim.cli.tables import ps
from virtshim.cri.client import connected
from virtshim.model.errors import InvalidRequest, NotFound, Unavailable, WrongState
from virtshim.streaming.ports import Streams

OUT = Streams(stdout=True)


def test_pods_and_vms_are_listed_newest_first_with_state_and_address(client: Client, world: World) -> None:
    first, made = client.running("web")
    world.outside.clock.advance(5)
    second = client.run("db")
    client.stop_pod(second)
    with connected(client.address.removeprefix("unix:")) as node:
        pods, vms = node.pods(), node.vms()
        assert [(pod.id, pod.namespace, pod.name, pod.is_ready) for pod in pods] == [
            (second, "default", "db", False),
            (first, "default", "web", True),
        ]
        assert [(vm.id, vm.pod, vm.name, vm.state) for vm in vms] == [(made, first, "vm", "running")]
        assert node.addresses(first) == ["10.88.0.2", "fd00::5"]
        assert node.addresses("f" * 64) == [], "it has gone meanwhile"


def test_ps_prints_the_pods_and_columns_that_are_asked_for(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    _, made = client.running("web")
    client.run("db")
    socket = client.address.removeprefix("unix:")

    def printed(wanted: str = "", template: str = "", *, quiet: bool = False) -> list[str]:
        capsys.readouterr()
        ps(socket, wanted, template, quiet=quiet)
        return sorted(line for line in capsys.readouterr().out.splitlines() if " [info " not in line)

    assert printed(template="{pod} {vm_state}") == ["default/db -", "default/web running"]
    assert printed("running", "{pod}") == printed(made[:20], "{pod}") == printed("/web", "{pod}") == ["default/web"]
    assert printed("nothing", "{pod}") == []
    assert printed(quiet=True) == [made]


def test_errors_keep_the_kind_and_the_words_of_the_node(client: Client) -> None:
    sandbox = client.run()
    made = client.create(sandbox)
    with connected(client.address.removeprefix("unix:")) as node:
        with pytest.raises(WrongState, match="created, not running"):
            node.console_url(made, stdin=False)
        with pytest.raises(NotFound, match="no such container"):
            node.exec_url("nothing", ["id"], OUT)
        with pytest.raises(InvalidRequest, match="the command is empty"):
            node.exec_url(made, [], OUT)


def test_a_missing_node_is_unavailable_and_the_error_has_the_remedy(tmp_path) -> None:
    with connected(f"{tmp_path}/none.sock") as node, pytest.raises(Unavailable, match="--socket"):
        node.pods()
