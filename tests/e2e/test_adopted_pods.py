"""A VM runs in the network namespace of another runtime's pod, and ends in order when a part of that pod goes away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from adopted_pods import ADDRESS, AdoptedPod, others_pod
from guest import BOOT, READY
from node import Node
from podclient import PodClient, container_config, pod_config, wait_for_log, wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.helpers]

# Seconds. virtshim looks at all pods every ten seconds.
NOTICED = 30.0


def config_of(node: Node) -> pb.PodSandboxConfig:
    config = pod_config("beside", f"{node.directory}/logs/beside")
    config.port_mappings.add(container_port=80)
    return config


@pytest.fixture
def pod(cri: PodClient, node: Node) -> Iterator[AdoptedPod]:
    with others_pod(f"{node.directory}/run/admin.sock", config_of(node)) as made:
        yield made
        cri.remove_pod(made.id)
        assert made.phase() == ""
    assert not passts(node)


def passts(node: Node) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"passt" in command.split(b"\0")[0] and node.directory.encode() in command:
                found.add(int(entry.name))
    return found


@contextlib.contextmanager
def helper(pod: AdoptedPod, address: str, port: int, directory: Path) -> Iterator[None]:
    """A container of the pod serves the directory there."""
    server = [sys.executable, "-u", "-m", "http.server", "--bind", address, "--directory", str(directory), str(port)]
    command = ["ip", "netns", "exec", pod.namespace.name, *server]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert b"Serving HTTP" in process.stdout.readline()
            yield
        finally:
            process.kill()


def created(cri: PodClient, pod: AdoptedPod, image: str, attempt: int = 0, **mounts: Path) -> str:
    pod.adopt()
    config = container_config(cri.pull(image), attempt=attempt)
    for name, host in mounts.items():
        config.mounts.add(container_path=f"/{name}", host_path=str(host))
    return cri.create(pod.id, config, pod.config)


def booted(cri: PodClient, vm: str) -> str:
    cri.start(vm)
    wait_for_log(cri.status(vm).log_path, READY, BOOT)
    return vm


def run(cri: PodClient, vm: str, script: str) -> str:
    done = cri.exec_sync(vm, "sh", "-c", script)
    assert done.exit_code == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


def ended(cri: PodClient, vm: str) -> pb.ContainerStatus:
    wait_until(lambda: cri.status(vm).state == pb.CONTAINER_EXITED, NOTICED, "the VM has ended")
    return cri.status(vm)


_FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


def fetched(pod: AdoptedPod, address: str) -> str:
    """What a container of the pod gets from the guest's web server."""
    return pod.namespace.run(sys.executable, "-c", _FETCH, f"http://{address}/")


def test_guest_and_helpers_share_address_loopback_and_volumes_over_restarts_of_all_daemons(
    cri: PodClient, node: Node, image_url: str, pod: AdoptedPod, tmp_path: Path
) -> None:
    (tmp_path / "from-helper").write_text("fetched")
    vm = booted(cri, created(cri, pod, f"{image_url}/guest.qcow2", data=tmp_path))
    run(cri, vm, "mkdir -p /srv/www; echo from the guest > /srv/www/index.html")
    assert ADDRESS in run(cri, vm, "ip address")
    assert run(cri, vm, "cat /data/from-helper; echo made > /data/from-guest") == "fetched"
    assert (tmp_path / "from-guest").read_text() == "made\n"
    assert cri.pods() == []
    before = passts(node), node.qemu_pids()
    assert len(before[0]) == 1
    with helper(pod, "127.0.0.1", 7000, tmp_path):
        for _ in range(2):
            for address in (ADDRESS, "127.0.0.1"):
                assert "from the guest" in fetched(pod, address)
            assert run(cri, vm, "wget -qO- http://169.254.7.1:7000/from-helper") == "fetched"
            node.stop()
            node.up()
            wait_until(lambda: cri.status(vm).state == pb.CONTAINER_RUNNING, 30, "virtshim knows the VM again")
        assert (passts(node), node.qemu_pids()) == before


def test_a_vm_whose_passt_dies_ends_as_network_lost_and_starts_again_in_the_same_sandbox(
    cri: PodClient, node: Node, image_url: str, pod: AdoptedPod
) -> None:
    first = created(cri, pod, f"{image_url}/null.qcow2")
    cri.start(first)
    (passt,) = passts(node)
    os.kill(passt, signal.SIGKILL)
    status = ended(cri, first)
    assert (status.exit_code, status.reason) == (137, "NetworkLost")
    assert "passt" in status.message
    second = created(cri, pod, f"{image_url}/null.qcow2", attempt=1)
    cri.start(second)
    assert cri.status(second).state == pb.CONTAINER_RUNNING
    assert len(passts(node)) == 1


def test_a_namespace_that_goes_ends_its_vm_and_the_record_goes_with_the_container(
    cri: PodClient, node: Node, image_url: str, pod: AdoptedPod
) -> None:
    vm = created(cri, pod, f"{image_url}/null.qcow2")
    cri.start(vm)
    pod.namespace.remove()
    status = ended(cri, vm)
    assert (status.exit_code, status.reason) == (137, "NetworkLost")
    assert pod.namespace.path in status.message
    wait_until(lambda: not passts(node), 10, "passt has ended")
    assert pod.phase() == "not-ready"
    with pytest.raises(grpc.RpcError, match=r"vst-cni"):
        pod.adopt()
    cri.remove(vm)
    wait_until(lambda: pod.phase() == "", NOTICED, "the record is gone")


def test_a_port_that_a_helper_holds_fails_the_start_with_its_number(
    cri: PodClient, node: Node, image_url: str, pod: AdoptedPod, tmp_path: Path
) -> None:
    vm = created(cri, pod, f"{image_url}/null.qcow2")
    with helper(pod, "0.0.0.0", 80, tmp_path), pytest.raises(grpc.RpcError, match=r"\b80\b"):
        cri.start(vm)
    assert (cri.status(vm).state, cri.status(vm).reason) == (pb.CONTAINER_EXITED, "StartError")
    assert not passts(node)
    again = created(cri, pod, f"{image_url}/null.qcow2", attempt=1)
    cri.start(again)
    assert cri.status(again).state == pb.CONTAINER_RUNNING


# The rules of Istio's and Linkerd's proxies, in a few lines. The proxies take what the pod's processes send (15001)
# and resolve (15053). They also take what comes from outside (15006), and send it on from 127.0.0.6. Their own user
# is exempt.
MESH = """
import os, socket, sys, threading
def serve(port, answer):
    with socket.create_server(("", port)) as server:
        ready.release()
        while True:
            with server.accept()[0] as client:
                answer(client, client.recv(4096))
def out(client, request):
    client.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nby the mesh")
def into(client, request):
    with socket.create_connection((sys.argv[1], 80), 20, ("127.0.0.6", 0)) as guest:
        guest.sendall(request)
        page = b"".join(iter(lambda: guest.recv(4096), b"")).partition(b"\\r\\n\\r\\n")[2]
        client.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nthrough the mesh " + page)
def names():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 15053))
        ready.release()
        while True:
            asked, who = server.recvfrom(512)
            is_ipv4 = asked.endswith(bytes((0, 1, 0, 1)))
            answer = bytes((192, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 192, 0, 2, 9)) if is_ipv4 else b""
            server.sendto(asked[:2] + bytes((129, 128, 0, 1, 0, int(is_ipv4), 0, 0, 0, 0)) + asked[12:] + answer, who)
os.setgid(1337)
os.setuid(1337)
ready = threading.Semaphore(0)
for work in ((serve, 15001, out), (serve, 15006, into), (names,)):
    threading.Thread(target=work[0], args=work[1:], daemon=True).start()
for _ in range(3):
    ready.acquire()
print("ready", flush=True)
sys.stdin.read()
"""
REDIRECTED = """
add table ip mesh
add chain ip mesh out { type nat hook output priority -100; }
add rule ip mesh out meta skuid 1337 return
add rule ip mesh out oifname lo return
add rule ip mesh out meta l4proto tcp redirect to :15001
add rule ip mesh out udp dport 53 redirect to :15053
add chain ip mesh in { type nat hook prerouting priority -100; }
add rule ip mesh in tcp dport 80 redirect to :15006
"""


@contextlib.contextmanager
def mesh(pod: AdoptedPod) -> Iterator[None]:
    pod.namespace.run("nft", "; ".join(REDIRECTED.strip().splitlines()))
    command = ["ip", "netns", "exec", pod.namespace.name, sys.executable, "-c", MESH, ADDRESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


def test_a_meshs_rules_take_the_guests_traffic_as_a_containers(cri: PodClient, image_url: str, pod: AdoptedPod) -> None:
    vm = booted(cri, created(cri, pod, f"{image_url}/guest.qcow2"))
    run(cri, vm, "mkdir -p /srv/www; echo from the guest > /srv/www/index.html")
    with mesh(pod):
        assert run(cri, vm, "wget -q -O - http://192.0.2.1:8000/") == "by the mesh"
        assert "192.0.2.9" in run(cri, vm, "nslookup any.test 10.96.0.10")
        asked = [sys.executable, "-c", _FETCH, f"http://{ADDRESS}/"]
        assert pod.namespace.run_outside(*asked).strip() == "through the mesh from the guest"
