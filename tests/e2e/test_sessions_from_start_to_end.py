"""Commands, console clients and forwarded ports work while a VM starts and stops, and commands say if there is no
agent."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import grpc
import pytest
from fakes.cri import refused
from fakes.spdy import close_all, spdy
from guest import BOOT
from node import Node
from podclient import PodClient, container_config, pod_config, wait_until
from running_vm import PRE_STOP, Vm

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

Code = grpc.StatusCode


def started(cri: PodClient, node: Node, image: str) -> Vm:
    config = pod_config("exec", f"{node.directory}/logs/exec")
    pod = cri.run_pod(config)
    wanted = container_config(cri.pull(image))
    wanted.annotations.update(PRE_STOP)
    container = cri.create(pod, wanted, config)
    cri.start(container)
    return Vm(cri, node, pod, container)


@pytest.fixture
def _sockets() -> Iterator[None]:
    yield
    close_all()


@pytest.mark.usefixtures("_sockets")
def test_a_command_waits_for_the_boot_up_to_its_limit_and_sessions_end_with_the_vm(
    cri: PodClient, node: Node, image_url: str
) -> None:
    vm = started(cri, node, f"{image_url}/guest.qcow2")
    with refused(Code.DEADLINE_EXCEEDED, "qemu-guest-agent"):
        vm.run("true", timeout=1)  # a probe's patience ends before the boot does
    assert vm.run("echo", "up", timeout=int(BOOT)).stdout == b"up\n"

    attached = spdy(cri.runtime.Attach(pb.AttachRequest(container_id=vm.container, stdout=True)).url)
    streams = {name: attached.open(streamtype=name) for name in ("error", "stdout")}
    attached.until(lambda: attached.replied == set(streams.values()))
    forward = spdy(cri.runtime.PortForward(pb.PortForwardRequest(pod_sandbox_id=vm.pod)).url, "portforward.k8s.io")
    forward.open(streamtype="error", port="80", requestid="0")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(vm.run, "sleep", "300")
        wait_until(lambda: vm.sh("ps | grep '[s]leep 300'")[0] == 0, 60, "it runs")
        cri.stop(vm.container, 0)
        with refused(Code.UNAVAILABLE, "ended"):
            call.result()
    assert b'"Success"' in attached.read_all(streams["error"])
    with refused(Code.FAILED_PRECONDITION, "exited"):
        vm.run("true")
    cri.stop_pod(vm.pod)
    forward.to_the_end()


def test_the_error_about_a_missing_agent_says_how_to_get_one(cri: PodClient, node: Node, image_url: str) -> None:
    vm = started(cri, node, f"{image_url}/null.qcow2")
    with refused(Code.DEADLINE_EXCEEDED, "install the package qemu-guest-agent"):
        vm.run("true", timeout=2)
    # A preStop hook is refused at once: it neither waits for a boot nor eats the grace period.
    with refused(Code.FAILED_PRECONDITION, "nothing in the guest listens"):
        vm.run("echo", "drained")
