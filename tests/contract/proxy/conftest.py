"""One proxy for all tests of a file, in front of two fake runtimes that are reset for each test."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.cri import Client
from fakes.proxy import Proxy
from fakes.runtime import FakeRuntime


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="vp-"))
    yield made
    shutil.rmtree(made)


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
