"""Port-forward and attach reach a real VM, by our own client, and by crictl if it is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from fakes.spdy import SpdyClient, close_all, spdy
from fakes.ws import Tunnel, websocket
from podclient import wait_for_log, wait_until
from running_vm import NAME, Vm

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest]

HAS_CRICTL = pytest.mark.skipif(
    not shutil.which("crictl"), reason="NOT TO BE HAD HERE: no distribution packages crictl"
)


@pytest.fixture(autouse=True)
def _sockets() -> Iterator[None]:
    yield
    close_all()


def forward_url(vm: Vm) -> str:
    return vm.cri.runtime.PortForward(pb.PortForwardRequest(pod_sandbox_id=vm.pod)).url


def over_spdy(vm: Vm) -> SpdyClient:
    return spdy(forward_url(vm), "portforward.k8s.io")


def over_tunnel(vm: Vm) -> SpdyClient:
    return SpdyClient(Tunnel(websocket(forward_url(vm), "SPDY/3.1+portforward.k8s.io")))


def connection(client: SpdyClient, port: int, number: int) -> tuple[int, int]:
    headers = {"port": str(port), "requestid": str(number)}
    error = client.open(streamtype="error", fin=True, **headers)
    return error, client.open(streamtype="data", **headers)


def attached(vm: Vm, **streams: bool) -> tuple[SpdyClient, dict[str, int]]:
    request = pb.AttachRequest(container_id=vm.container, **streams)
    client = spdy(vm.cri.runtime.Attach(request).url)
    names = ["error", *(name for name in ("stdin", "stdout", "stderr") if streams.get(name))]
    numbers = {name: client.open(streamtype=name) for name in names}
    client.until(lambda: client.replied == set(numbers.values()))
    return client, numbers


@pytest.mark.parametrize("opened", [over_spdy, over_tunnel])
def test_the_guests_web_server_answers_through_port_forward(vm, opened):
    client = opened(vm)
    pairs = [connection(client, 80, number) for number in range(8)]
    for _, data in pairs:
        client.write(data, b"GET / HTTP/1.0\r\nHost: guest\r\n\r\n", fin=True)
    for error, data in pairs:
        page = client.read_all(data)
        assert b" 200 OK" in page.splitlines()[0]
        assert NAME.encode() in page, "the page names the pod"
        assert client.read_all(error) == b""


def test_a_port_without_a_listener_is_reported(vm):
    client = over_spdy(vm)
    error, _data = connection(client, 81, 0)
    assert b"port 81" in client.read_all(error)


def test_the_size_of_the_clients_terminal_reaches_the_guests_console(vm):
    request = pb.AttachRequest(container_id=vm.container, stdin=True, stdout=True, tty=True)
    client = spdy(vm.cri.runtime.Attach(request).url)
    numbers = {name: client.open(streamtype=name) for name in ("error", "stdin", "stdout", "resize")}
    client.until(lambda: client.replied == set(numbers.values()))
    client.write(numbers["resize"], b'{"Width":133,"Height":41}')

    def size() -> bytes:
        return vm.cri.exec_sync(vm.container, "sh", "-c", "stty size </dev/ttyS0").stdout

    wait_until(lambda: size() == b"41 133\n", 60, "the guest's console has the size of the client's terminal")


def test_commands_typed_on_an_attached_console_run_in_the_guest_and_all_clients_see_it(vm):
    first, one = attached(vm, stdin=True, stdout=True)
    second, two = attached(vm, stdin=True, stdout=True)
    first.write(one["stdin"], b"echo for $((20+1)) both\n")
    for client, streams in ((first, one), (second, two)):
        client.until(lambda c=client, s=streams: b"for 21 both" in c.received[s["stdout"]])
    first.leave()
    second.write(two["stdin"], b"echo still $((20+2))\n")
    second.until(lambda: b"still 22" in second.received[two["stdout"]])
    wait_for_log(vm.log, "still 22", 60)


def test_input_of_a_client_that_leaves_at_once_still_arrives(vm):
    client, streams = attached(vm, stdin=True, stdout=True)
    client.write(streams["stdin"], b"echo from one who $((30+1)) left\n")
    client.leave()
    wait_for_log(vm.log, "from one who 31 left", 60)


def test_a_console_can_be_attached_again_and_again(vm):
    for number in range(3):
        client, streams = attached(vm, stdin=True, stdout=True)
        client.write(streams["stdin"], f"echo time $((40+{number}))\n".encode())
        client.until(lambda n=number, c=client, s=streams: f"time {40 + n}".encode() in c.received[s["stdout"]])
        client.leave()


@HAS_CRICTL
def test_crictl_forwards_a_port(vm):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*crictl(vm), "port-forward", vm.pod, f"{port}:80"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        wait_until(lambda: accepts(port), 60, "crictl listens")
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20) as answer:
                assert NAME.encode() in answer.read()
    finally:
        process.terminate()
        process.communicate(timeout=20)


@HAS_CRICTL
def test_crictl_attaches_to_the_console(vm):
    process = subprocess.Popen(
        [*crictl(vm), "attach", "-i", vm.container], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    seen = bytearray()

    def read() -> None:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 4096):
            seen.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    assert process.stdin is not None
    try:
        process.stdin.write(b"echo crictl $((50+1))\n")
        process.stdin.flush()
        wait_until(lambda: b"crictl 51" in seen, 60, "the console answers")
    finally:
        process.kill()  # of an attached one SIGTERM is not the end
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(20)
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def crictl(vm: Vm) -> list[str]:
    return ["crictl", "-r", f"unix://{vm.node.socket}", "-t", "60s"]


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
