"""`virtshim up` restarts daemons that are killed, gives up on a daemon that never comes up, and ends at Ctrl-C during a
pause."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from node import Node, free_cidr
from podclient import PodClient, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.operator]

# Kills of all daemons together. An earlier `up` gave up at the sixth.
KILLS, EVERY_KILL = 2, 6


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    directory = tempfile.mkdtemp(prefix="vsup-")
    os.chmod(directory, 0o711)
    made = Node(f"{directory}/node", free_cidr())
    made.up()
    try:
        yield made
    finally:
        made.down()
        shutil.rmtree(directory)


def back(node: Node, name: str, times: int) -> bool:
    return node.log().count(f"up: {name} runs again") >= times


def serves(node: Node) -> bool:
    with PodClient(node.socket) as client:
        status = client.runtime.Status(pb.StatusRequest(), timeout=60).status
    return all(condition.status for condition in status.conditions)


def test_up_restarts_a_daemon_after_any_number_of_kills(node: Node, every_point: bool) -> None:
    kills = EVERY_KILL if every_point else KILLS
    for number in range(1, kills + 1):
        name = ("tapmanager", "virtshim")[number % 2]
        os.kill(node.daemons()[name], signal.SIGKILL)
        wait_until(lambda name=name, number=number: back(node, name, (number + 1) // 2), 120, f"{name} is back")
    assert node.log().count("was killed by SIGKILL; starting it again") == kills
    assert serves(node)


def test_sighup_reloads_settings_in_both_daemons(node: Node) -> None:
    file = Path(node.directory, "config.toml")
    before = file.read_text()
    file.write_text(
        before.replace("[tapmanager]\n", "[tapmanager]\ncni_timeout = 33\n") + '[vm]\ndefault_memory = "96MiB"\n'
    )
    for pid in node.daemons().values():
        os.kill(pid, signal.SIGHUP)
    wait_until(lambda: "settings.reloaded changed=cni_timeout" in node.log(), 60, "tapmanager has taken it over")
    wait_until(lambda: "vm.default_memory" in node.log(), 60, "virtshim has taken it over")
    file.write_text("nonsense")
    for pid in node.daemons().values():
        os.kill(pid, signal.SIGHUP)
    wait_until(lambda: node.log().count("settings.refused") == 2, 60, "both have refused it")
    assert serves(node)
    file.write_text(before)


@pytest.mark.full
def test_a_daemon_that_never_comes_up_is_given_up_with_its_error(node: Node) -> None:
    process = node.process
    assert process is not None
    file = Path(node.directory, "config.toml")
    before = file.read_text()
    file.write_text(before.replace("[tapmanager]\n", "[tapmanager]\ncni_timout = 33\n"))
    os.kill(node.daemons()["tapmanager"], signal.SIGKILL)
    assert process.wait(120) == 69, node.log()
    node.process = None
    said = node.log()[node.log().rindex("virtshim: tapmanager ended with code 1") :]
    assert "6 times in a row; giving up. The VMs keep running" in said
    assert "did you mean tapmanager.cni_timeout?" in said
    file.write_text(before)


def test_ctrl_c_ends_up_at_once_while_it_waits_for_a_daemon(node: Node) -> None:
    if node.process is None:
        node.up()
    file = Path(node.directory, "config.toml")
    before = file.read_text()
    file.write_text("nonsense")
    with contextlib.suppress(ProcessLookupError):
        os.kill(node.daemons()["tapmanager"], signal.SIGKILL)
    wait_until(lambda: "starting it again in 2 s" in node.log(), 60, "it waits")
    node.stop()
    assert "starting it again in 4 s" not in node.log(), "it has waited for another try"
    file.write_text(before)
