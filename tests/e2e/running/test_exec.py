"""Commands run in a real guest by its own agent."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import signal
from collections.abc import Iterator

import grpc
import pytest
from fakes.cri import refused
from fakes.spdy import SpdyClient, close_all, spdy
from guest import answers
from podclient import wait_until
from running_vm import NAME, Vm

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

Code = grpc.StatusCode


def test_a_pre_stop_hook_runs_where_an_agent_listens(vm: Vm):
    assert vm.run("echo", "drained").stdout == b"drained\n"


def test_exit_codes_and_both_streams_are_exact(vm: Vm):
    assert vm.sh("echo out; echo err >&2; exit 9") == (9, b"out\n", b"err\n")
    assert vm.sh("kill -9 $$") == (137, b"", b"")
    assert vm.run("no-such-program").exit_code == 127
    assert vm.run("cat").stdout == b"", "there is no input"


def test_a_command_has_the_containers_environment_and_directory(vm: Vm):
    code, out, _ = vm.sh("pwd; echo $GREETING; echo $HOME")
    assert (code, out) == (0, b"/srv\nhello there\n/root\n")
    assert b"odd.name=too\n" in vm.run("env").stdout, "a shell would drop it"


def test_binary_data_passes_and_output_beyond_16_mib_does_not_stop_the_command(vm: Vm):
    code, out, err = vm.sh("head -c 1000000 /dev/urandom > /run/data; md5sum < /run/data >&2; cat /run/data")
    assert code == 0
    assert hashlib.md5(out).hexdigest() == err.decode().split()[0]
    code, out, err = vm.sh("head -c 20000000 /dev/zero; echo after >&2; exit 4")
    assert (code, err) == (4, b"after\n")
    assert 16_000_000 < len(out) <= 16 << 20


def test_a_time_limit_kills_the_command_and_all_its_children(vm: Vm):
    with refused(Code.DEADLINE_EXCEEDED, "killed"):
        vm.sh("sleep 4321 & setsid sleep 4321 & (sleep 4321; true) & sleep 4321; true", timeout=1)
    assert vm.sh("ps | grep '[s]leep 4321'") == (1, b"", b"")


def test_a_command_ends_when_its_client_leaves(vm: Vm):
    request = pb.ExecSyncRequest(container_id=vm.container, cmd=["sleep", "5432"])
    call = vm.cri.runtime.ExecSync.future(request, timeout=60)
    wait_until(lambda: vm.sh("ps | grep '[s]leep 5432'")[0] == 0, 60, "it runs")
    call.cancel()
    wait_until(lambda: vm.sh("ps | grep '[s]leep 5432'")[0] == 1, 60, "it is gone")


def test_a_daemon_started_by_a_command_keeps_running_and_does_not_block_the_call(vm: Vm):
    assert vm.sh("sleep 6543 & echo started") == (0, b"started\n", b"")
    assert vm.sh("ps | grep '[s]leep 6543'")[0] == 0
    assert vm.sh("kill $(pidof sleep)")[0] == 0


def test_fifty_commands_run_at_the_same_time(vm: Vm):
    """The commands need a hundred ports, and the VM started with twelve. No command ends before all have begun."""
    assert vm.sh("mkdir /run/met && mkfifo /run/gate")[0] == 0
    script = ": >/run/met/$0; cat /run/gate; echo $0; echo e$0 >&2; exit $0"
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        calls = [pool.submit(vm.run, "sh", "-c", script, str(n)) for n in range(50)]
        wait_until(lambda: vm.sh("[ $(ls /run/met | wc -l) = 50 ]")[0] == 0, 100, "all run")
        assert vm.sh(": >/run/gate")[0] == 0
        answers = [(done.exit_code, done.stdout, done.stderr) for done in (call.result() for call in calls)]
    assert answers == [(n, f"{n}\n".encode(), f"e{n}\n".encode()) for n in range(50)]
    left = "ps | grep 'virtshim-exec .*run/met/[$]0'"  # not the words of this command itself
    wait_until(lambda: vm.sh(left)[0] == 1, 60, "nothing of them is left")


def streamed(vm: Vm, *words: str, **wanted: bool) -> tuple[SpdyClient, dict[str, int]]:
    """Runs a command as `kubectl exec` does: a URL, then streams over SPDY. The stream `error` reports the end."""
    url = vm.cri.runtime.Exec(pb.ExecRequest(container_id=vm.container, cmd=words, **wanted), timeout=20).url
    client = spdy(url)
    names = ["error", *(name for name in ("stdin", "stdout", "stderr") if wanted.get(name))]
    streams = {name: client.open(streamtype=name) for name in names}
    if wanted.get("tty"):
        streams["resize"] = client.open(streamtype="resize")
    client.until(lambda: client.replied >= set(streams.values()))
    return client, streams


@pytest.fixture
def _sockets() -> Iterator[None]:
    yield
    close_all()


@pytest.mark.usefixtures("_sockets")
def test_streams_of_a_command_pass_both_ways_while_it_runs(vm: Vm):
    client, streams = streamed(vm, "sh", "-c", "echo ready; cat; exit 7", stdin=True, stdout=True, stderr=True)
    client.until(lambda: b"ready\n" in client.received[streams["stdout"]])
    data = os.urandom(500_000)
    for start in range(0, len(data), 50_000):
        client.write(streams["stdin"], data[start : start + 50_000])
    client.write(streams["stdin"], b"", fin=True)
    assert client.read_all(streams["stdout"]) == b"ready\n" + data
    assert client.read_all(streams["stderr"]) == b""
    status = json.loads(client.read_all(streams["error"]))
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "7"}]


@pytest.mark.usefixtures("_sockets")
def test_a_terminal_has_its_size_and_control_characters(vm: Vm):
    client, streams = streamed(vm, "/bin/sh", stdin=True, stdout=True, tty=True)
    client.write(streams["resize"], json.dumps({"Width": 123, "Height": 45}).encode())
    for _ in range(50):
        client.write(streams["stdin"], b"stty size; tty; echo ask''ed\n")
        before = client.received[streams["stdout"]].count(b"asked")
        client.until(lambda before=before: client.received[streams["stdout"]].count(b"asked") > before)
        if b"45 123" in client.received[streams["stdout"]]:
            break
    assert b"45 123\r\n/dev/pts/" in client.received[streams["stdout"]]
    client.write(streams["stdin"], b"sleep 7654\n")
    wait_until(lambda: vm.sh("ps | grep '[s]leep 7654'")[0] == 0, 60, "it runs")
    client.write(streams["stdin"], b"\3")
    wait_until(lambda: vm.sh("ps | grep '[s]leep 7654'")[0] == 1, 60, "it was interrupted")
    client.write(streams["stdin"], b"exit 3\n")
    status = json.loads(client.read_all(streams["error"]))
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]


@pytest.mark.usefixtures("_sockets")
def test_a_terminal_session_ends_when_its_client_hangs_up(vm: Vm):
    client, _ = streamed(vm, "sh", "-c", "sleep 8765; true", stdin=True, stdout=True, tty=True)
    wait_until(lambda: vm.sh("ps | grep '[s]leep 8765'")[0] == 0, 60, "it runs")
    client.leave()
    wait_until(lambda: vm.sh("ps | grep '[s]leep 8765'")[0] == 1, 60, "it is gone")


def test_the_status_has_facts_from_the_guest(vm: Vm):
    request = pb.ContainerStatusRequest(container_id=vm.container, verbose=True)
    told = json.loads(vm.cri.runtime.ContainerStatus(request, timeout=20).info["guestInfo"])
    assert told["system"]["pretty-name"] == "virtshim guest"
    assert told["hostname"] == NAME


def test_after_a_daemon_kill_new_commands_work_and_old_ones_are_ended(vm: Vm):
    node = vm.node
    request = pb.ExecSyncRequest(container_id=vm.container, cmd=["sh", "-c", "while echo loud; do sleep 1; done"])
    call = vm.cri.runtime.ExecSync.future(request, timeout=60)
    wait_until(lambda: vm.sh("ps | grep '[e]cho loud'")[0] == 0, 60, "it runs")
    victim = node.daemons()["virtshim"]
    os.kill(victim, signal.SIGKILL)
    with refused(Code.UNAVAILABLE, ""):
        call.result()
    wait_until(lambda: node.daemons().get("virtshim", victim) != victim, 60, "virtshim runs again")
    wait_until(lambda: answers(vm.cri), 60, "the CRI socket serves")
    for number in range(14):  # each port twice
        assert vm.sh(f"echo {number}") == (0, f"{number}\n".encode(), b"")
    assert vm.sh("ps | grep '[e]cho loud'")[0] == 1
