"""The output of a container's command in a real guest is the container's log, and its end is the container's end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from fakes.spdy import close_all, spdy
from guest import BOOT, answers
from imageserver import Registry, push_container_disk
from node import Node
from podclient import PodClient, container_config, pod_config, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

JOB = """
echo hello $GREETING from $(pwd)
echo queue of $(cat /proc/sys/net/core/somaxconn)
echo trouble >&2
until [ -e /run/go ]; do sleep 0.2; done
seq 1 5000
head -c 5000 /dev/zero | tr '\\0' x > /run/last/words
echo that was all >> /run/last/words
exit 3
"""


def lines(log: Path) -> list[str]:
    """The log lines without their times."""
    return [line.split(" ", 1)[1] for line in log.read_bytes().decode().split("\n")[:-1]] if log.exists() else []


def test_a_command_writes_the_log_survives_a_restart_of_virtshim_and_ends_the_container(
    cri: PodClient, node: Node, image_url: str
):
    config = pod_config("job", f"{node.directory}/logs/job")
    config.linux.sysctls["net.core.somaxconn"] = "321"  # securityContext.sysctls
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.command.extend(["sh", "-c"])
    wanted.args.append(JOB)
    wanted.working_dir = "/srv"
    wanted.envs.add(key="GREETING", value=b"there")
    last_words = Path(node.directory, "last-words")
    last_words.touch(0o666)
    wanted.mounts.add(container_path="/run/last/words", host_path=str(last_words))
    wanted.annotations["io.kubernetes.container.terminationMessagePath"] = "/run/last/words"
    made = cri.create(pod, wanted, config)
    log = Path(config.log_directory, wanted.log_path)
    cri.start(made)
    assert cri.status(made).state == pb.CONTAINER_RUNNING
    both = {"stdout F queue of 321", "stderr F trouble"}  # the streams come each for itself
    wait_until(lambda: both <= set(lines(log)), BOOT, "the command runs")

    victim = node.daemons()["virtshim"]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: node.daemons().get("virtshim", victim) != victim, 60, "virtshim runs again")
    wait_until(lambda: answers(cri), 60, "the CRI socket serves")
    assert cri.exec_sync(made, "touch", "/run/go").exit_code == 0
    wait_until(lambda: cri.status(made).state == pb.CONTAINER_EXITED, 60, "the container has ended")

    status = cri.status(made)
    assert (status.exit_code, status.reason) == (3, "Error")
    message = last_words.read_bytes()
    assert (len(message), message[-14:]) == (4096, b"xthat was all\n")
    said = [line for line in lines(log) if line.startswith("stdout")]
    assert "".join(
        line[9:] + "\n" * (line[7] == "F") for line in said
    ) == "hello there from /srv\nqueue of 321\n" + "".join(f"{number}\n" for number in range(1, 5001))
    assert lines(log).count("stderr F trouble") == 1
    cri.remove_pod(pod)


def test_an_image_with_an_entrypoint_runs_it_as_the_containers_command(
    cri: PodClient, node: Node, oci_registry: Registry, guest_image: Path
):
    """A plain image of the same disk stays a VM without a command."""
    script = "echo $MODE from $(pwd) with $*; [ $# = 1 ] || exit 9; touch /srv/x 2>/dev/null && exit 8; exit 5"
    says = {"Entrypoint": ["sh", "-c", script, "x"], "Cmd": ["one", "two"], "Env": ["MODE=image"], "WorkingDir": "/srv"}
    push_container_disk(oci_registry.address, "vms/server", guest_image, says=says)
    name = f"{oci_registry.address}/vms/server"
    config = pod_config("entrypoint", f"{node.directory}/logs/entrypoint")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(name))
    wanted.image.user_specified_image = name
    wanted.args.append("args")
    wanted.linux.security_context.readonly_rootfs = True
    made = cri.create(pod, wanted, config)
    cri.start(made)
    wait_until(lambda: cri.status(made).state == pb.CONTAINER_EXITED, BOOT, "the entrypoint has ended")
    assert cri.status(made).exit_code == 5
    assert lines(Path(config.log_directory, wanted.log_path)) == ["stdout F image from /srv with args"]
    cri.remove_pod(pod)


@pytest.mark.full  # running/test_exec.py has a terminal, running/test_streaming.py a console that is attached to
def test_attach_reaches_a_command_with_a_terminal(cri: PodClient, node: Node, image_url: str):
    config = pod_config("typed", f"{node.directory}/logs/typed")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.command.extend(["sh", "-c", "echo begun; read word; stty size; echo said $word; read rest || exit 7"])
    wanted.stdin = wanted.tty = True
    made = cri.create(pod, wanted, config)
    log = Path(config.log_directory, wanted.log_path)
    cri.start(made)
    wait_until(lambda: "stdout F begun" in lines(log), BOOT, "the command runs")

    request = pb.AttachRequest(container_id=made, stdin=True, stdout=True, tty=True)
    client = spdy(cri.runtime.Attach(request).url)
    numbers = {name: client.open(streamtype=name) for name in ("error", "stdin", "stdout", "resize")}
    client.until(lambda: client.replied == set(numbers.values()))
    client.write(numbers["resize"], b'{"Width":133,"Height":41}')
    size = ("sh", "-c", "stty size </dev/pts/0")
    wait_until(lambda: cri.exec_sync(made, *size).stdout == b"41 133\n", 60, "the terminal has the client's size")
    client.write(numbers["stdin"], b"hello\r")
    client.until(lambda: b"41 133\r\nsaid hello\r\n" in client.received[numbers["stdout"]])
    client.write(numbers["stdin"], b"\x04")
    assert b'"7"' in client.read_all(numbers["error"]), "the command's exit code"
    wait_until(lambda: cri.status(made).state == pb.CONTAINER_EXITED, 60, "the container has ended")
    assert cri.status(made).exit_code == 7
    close_all()
    cri.remove_pod(pod)


SERVER = """
trap 'echo draining; sleep 1; echo drained; exit 7' USR1
trap 'echo wrong signal; exit 8' TERM
echo up
while :; do sleep 0.2; done
"""


def test_a_stopped_command_gets_its_signal_and_its_last_output_and_exit_code_count(
    cri: PodClient, node: Node, image_url: str
):
    config = pod_config("server", f"{node.directory}/logs/server")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.command.extend(["sh", "-c", SERVER])
    wanted.stop_signal = pb.SIGNAL_SIGUSR1
    made = cri.create(pod, wanted, config)
    log = Path(config.log_directory, wanted.log_path)
    cri.start(made)
    wait_until(lambda: "stdout F up" in lines(log), BOOT, "the command runs")
    cri.stop(made, 120)
    status = cri.status(made)
    assert (status.exit_code, status.reason) == (7, "Error")
    assert lines(log) == ["stdout F up", "stdout F draining", "stdout F drained"]
    cri.remove_pod(pod)


DRAINING = """
trap 'echo draining; sleep 4; echo drained; exit 7' TERM
echo up
while :; do sleep 0.2; done
"""


@pytest.mark.full
def test_output_and_exit_code_survive_if_virtshim_is_killed_while_a_command_ends(
    cri: PodClient, node: Node, image_url: str
):
    config = pod_config("drained", f"{node.directory}/logs/drained")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.command.extend(["sh", "-c", DRAINING])
    made = cri.create(pod, wanted, config)
    log = Path(config.log_directory, wanted.log_path)
    cri.start(made)
    wait_until(lambda: "stdout F up" in lines(log), BOOT, "the command runs")
    stop = cri.runtime.StopContainer.future(pb.StopContainerRequest(container_id=made, timeout=120))
    wait_until(lambda: "stdout F draining" in lines(log), 60, "it has its signal")
    victim = node.daemons()["virtshim"]
    os.kill(victim, signal.SIGKILL)
    assert stop.exception(60) is not None
    wait_until(lambda: node.daemons().get("virtshim", victim) != victim, 60, "virtshim runs again")
    wait_until(lambda: answers(cri), 60, "the CRI socket serves")
    wait_until(lambda: cri.status(made).state == pb.CONTAINER_EXITED, 60, "it has ended, though nobody asks again")
    assert cri.status(made).exit_code == 7
    assert lines(log) == ["stdout F up", "stdout F draining", "stdout F drained"]
    cri.stop(made, 30)
    cri.remove_pod(pod)
