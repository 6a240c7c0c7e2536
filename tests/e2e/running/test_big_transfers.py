"""Much data passes through a guest both ways, unchanged, without growth of the daemon's memory. With `--all` it is a
GiB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from big_transfers import end_echo, forwarded, serve_echo, there_and_back
from fakes.spdy import close_all, spdy
from running_vm import Vm

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.timeout(3000)]

_MIB = 1 << 20


@pytest.fixture(autouse=True)
def _sockets() -> Iterator[None]:
    yield
    close_all()


def test_much_data_passes_through_a_commands_input_and_output(vm: Vm, request: pytest.FixtureRequest) -> None:
    size = 1024 * _MIB if request.config.getoption("--all") else 8 * _MIB
    asked = pb.ExecRequest(container_id=vm.container, cmd=["cat"], stdin=True, stdout=True)
    client = spdy(vm.cri.runtime.Exec(asked, timeout=20).url)
    streams = {name: client.open(streamtype=name) for name in ("error", "stdin", "stdout")}
    client.until(lambda: client.replied >= set(streams.values()))
    there_and_back(client, streams["stdin"], streams["stdout"], size, vm.node)
    assert b"Success" in client.read_all(streams["error"])


def test_much_data_passes_through_a_port_of_the_pods_address(vm: Vm, request: pytest.FixtureRequest) -> None:
    # Ten times as fast as a command, so it can carry more than the daemon may hold.
    size = 1024 * _MIB if request.config.getoption("--all") else 96 * _MIB
    serve_echo(vm)
    client, error, data = forwarded(vm)
    there_and_back(client, data, data, size, vm.node)
    assert client.read_all(error) == b""
    end_echo(vm)
