"""One proxy for all tests of a file, in front of two fake runtimes that are reset for each test."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.cri import Client
from fakes.journal import WAIT_LIMIT
from fakes.proxy import Proxy
from fakes.runtime import FakeRuntime
from fakes.shared_pods import Node, fresh, is_answering, serving
from podclient import wait_until


def _short_directory() -> Iterator[Path]:
    """A directory with a short path, for sockets. It is in memory in `make test`, as the proxy syncs what it keeps."""
    made = Path(tempfile.mkdtemp(prefix="vp-", dir="/var/tmp"))
    yield made
    shutil.rmtree(made)


directory = pytest.fixture(_short_directory, scope="module", name="directory")
place = pytest.fixture(_short_directory, name="place")


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[tuple[Proxy, FakeRuntime, FakeRuntime]]:
    with (
        FakeRuntime(f"{directory}/primary.sock", "primary") as primary,
        FakeRuntime(f"{directory}/other.sock", "other") as other,
        # With failing lists the proxy lists nothing by itself. The routing rules are the same.
        Proxy(directory, primary.socket, other.socket, others='when_down = "fail"') as proxy,
    ):
        yield proxy, primary, other


def _fresh(runtime: FakeRuntime) -> FakeRuntime:
    for records in (runtime.calls, runtime.answers, runtime.pods, runtime.containers, runtime.images):
        records.clear()
    runtime.needs_images = False
    return runtime


@pytest.fixture
def proxy(shared: tuple[Proxy, FakeRuntime, FakeRuntime]) -> Proxy:
    return shared[0]


@pytest.fixture
def client(proxy: Proxy) -> Client:
    return proxy.client


@pytest.fixture
def primary(shared: tuple[Proxy, FakeRuntime, FakeRuntime]) -> FakeRuntime:
    return _fresh(shared[1])


@pytest.fixture
def other(shared: tuple[Proxy, FakeRuntime, FakeRuntime]) -> FakeRuntime:
    return _fresh(shared[2])


# Fixtures for pods that the primary makes and whose VM virtshim runs.


@pytest.fixture(scope="module")
def one_node() -> Iterator[Node]:
    with serving('when_down = "fail"') as made:
        yield made


@pytest.fixture
def node(one_node: Node) -> Iterator[Node]:
    yield fresh(one_node)
    for runtime in (one_node.virtshim, one_node.admin):
        runtime.answers.clear()
        if not runtime.is_up:
            runtime.start()
    wait_until(lambda: is_answering(one_node.client), WAIT_LIMIT, "virtshim is back")


@pytest.fixture
def degraded_node() -> Iterator[Node]:
    """While virtshim is down, its last known containers stand in."""
    with serving() as made:
        yield fresh(made)
