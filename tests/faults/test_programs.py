"""When qemu-img or CNI plugins fail, die, hang or print garbage, the call says so, nothing half-made stays, and nothing
else is affected. The repeated call works once the program does."""

from __future__ import annotations

import itertools
import threading

import grpc
import pytest
from mortal_node import CNI_LIMIT, CNI_PLUGINS, MortalNode
from podclient import wait_until
from refusals import failing
from work import Work, forget_image

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.faults]

# The time beyond a limit that killing and undoing may take on a busy machine.
SLACK = 10.0

SIZES = itertools.count()

# Writes a part of the disk it was to make, whose name is before the size.
HALF_A_DISK = 'for word; do last=$disk disk=$word; done; head -c 100000 /dev/urandom > "$last"; '
ONLY_ADD = '[ "$CNI_COMMAND" = ADD ] || exec {real}; '
ONLY_DEL = '[ "$CNI_COMMAND" = DEL ] || exec {real}; '


def is_listed(work: Work) -> bool:
    return bool([c for c in work.cri.containers() if c.pod_sandbox_id == work.pod])


def test_an_image_is_not_blamed_for_a_qemu_img_that_was_killed(mortal: MortalNode, work: Work) -> None:
    forget_image(work.cri, work.image)
    with mortal.program(mortal.programs, "qemu-img", "kill -KILL $$"):
        failing(work.pull, grpc.StatusCode.INTERNAL, "qemu-img was killed by signal")
    assert not work.is_pulled()
    assert not mortal.image_files() - mortal.image_files(work.cri)
    work.pull()
    assert work.is_pulled()


def test_a_pull_whose_qemu_img_hangs_ends_when_its_caller_gives_up(mortal: MortalNode, work: Work) -> None:
    forget_image(work.cri, work.image)
    with mortal.program(mortal.programs, "qemu-img", "exec sleep 600"):
        request = pb.PullImageRequest(image=pb.ImageSpec(image=work.image))
        failing(lambda: work.cri.images.PullImage(request, timeout=2), grpc.StatusCode.DEADLINE_EXCEEDED, "")
        wait_until(lambda: not mortal.image_files() - mortal.image_files(work.cri), SLACK, "the download is gone")
    work.pull()


KILLED = (HALF_A_DISK + "kill -KILL $$", grpc.StatusCode.INTERNAL, "killed by signal")
HANGING = (HALF_A_DISK + "exec sleep 600", grpc.StatusCode.DEADLINE_EXCEEDED, "qemu-img took too long")
OF_THE_POD = {"virtshim.io/root-disk": "pod"}


@pytest.mark.parametrize(
    ("annotations", "script", "code", "words"),
    [
        pytest.param({}, *KILLED, id="killed, own disk"),
        pytest.param(OF_THE_POD, *KILLED, id="killed, disk of the pod"),
        pytest.param({}, *HANGING, id="hanging, own disk", marks=pytest.mark.full),
        pytest.param(OF_THE_POD, *HANGING, id="hanging, disk of the pod"),
    ],
)
def test_a_half_made_root_disk_is_never_used(
    mortal: MortalNode, work: Work, annotations: dict[str, str], script: str, code: grpc.StatusCode, words: str
) -> None:
    # A unique size, because a disk of a known size is copied.
    work.config.annotations.update({**annotations, "VirtletRootVolumeSize": f"{1024 + next(SIZES)}Mi"})
    work.run()
    with mortal.program(mortal.programs, "qemu-img", script):
        failing(work.create, code, words)
    assert not is_listed(work)
    work.create()
    work.start()
    wait_until(work.is_running, SLACK, "the VM runs from a whole disk")


def test_a_hung_cni_plugin_is_killed_at_its_limit_and_blocks_no_other_pod(mortal: MortalNode, work: Work) -> None:
    other = Work(mortal, work.cri, work.image)
    stuck = f'case "$CNI_ARGS" in *K8S_POD_NAME={work.config.metadata.name}*) ;; *) exec {{real}};; esac; '
    failures: list[grpc.RpcError] = []

    def run() -> None:
        try:
            work.run()
        except grpc.RpcError as error:
            failures.append(error)

    with plugin(mortal, ONLY_ADD + stuck + "exec sleep 600"):
        slow = threading.Thread(target=run)
        slow.start()
        other.run()
        assert slow.is_alive(), "the other pod has waited for its plugin"
        for step in (other.create, other.start, other.stop, other.remove_pod):
            step()
        mortal.check_bystander(work.cri)
        slow.join(CNI_LIMIT + SLACK)
        assert not slow.is_alive(), "the plugin's time is over"
    assert [failure.code() for failure in failures] == [grpc.StatusCode.DEADLINE_EXCEEDED], failures
    assert 'CNI plugin "bridge"' in failures[0].details()
    assert not [pod for pod in work.cri.pods() if pod.metadata.uid == work.config.metadata.uid]
    work.run()
    assert work.is_ready()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 1", 'CNI plugin "bridge" of network "NETWORK" failed at ADD'),
        ("kill -SEGV $$", 'CNI plugin "bridge" of network "NETWORK" failed at ADD: killed by signal 11'),
        ("echo what is this", 'CNI plugin "bridge" of network "NETWORK" did not return JSON'),
        ('echo "[]"', 'CNI plugin "bridge" of network "NETWORK" did not return a JSON object'),
        ('echo "{}"', "the CNI result has no IP address"),
        ("{real}; exit 3", 'CNI plugin "bridge" of network "NETWORK" failed at ADD'),
    ],
    ids=["fails", "dies", "prints garbage", "prints a list", "prints nothing of use", "fails after its work"],
)
def test_a_cni_plugins_failure_is_reported_and_everything_is_undone(
    mortal: MortalNode, work: Work, script: str, words: str
) -> None:
    before = mortal.left()
    with plugin(mortal, ONLY_ADD + script):
        failing(work.run, grpc.StatusCode.INTERNAL, words.replace("NETWORK", mortal.network))
    assert len(work.cri.pods()) == 1, "only the pod beside it"
    wait_until(lambda: mortal.left() <= before, SLACK, "its namespace, links and lease are gone")
    work.run()
    assert work.is_ready()


def test_a_network_that_cannot_be_released_is_kept_and_retried_for_ever(mortal: MortalNode, work: Work) -> None:
    work.run()
    address = work.cri.pod_ip(work.pod)
    other = Work(mortal, work.cri, work.image)
    with plugin(mortal, ONLY_DEL + "echo no >&2; exit 1"):
        for call in (work.stop_pod, work.stop_pod, work.remove_pod):
            failing(call, grpc.StatusCode.INTERNAL, "failed at DEL")
        mortal.restart()
        failing(work.remove_pod, grpc.StatusCode.INTERNAL, "failed at DEL")
        assert work.cri.pod_status(work.pod).state == pb.SANDBOX_NOTREADY
        other.run()
        assert work.cri.pod_ip(other.pod) != address, "its address is still taken"
        assert any(item.endswith(f"/{address}") for item in mortal.left()), "its lease is kept"
    work.remove_pod()
    assert work.is_pod_removed()
    assert not any(item.endswith(f"/{address}") for item in mortal.left())
    other.remove_pod()


def plugin(node: MortalNode, script: str):
    """Replaces the bridge plugin."""
    return node.program(node.plugins, "bridge", script.replace("{real}", f"{CNI_PLUGINS}/bridge"))
