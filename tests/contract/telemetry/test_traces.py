"""kubelet's trace continues in the proxy, in virtshim and in the parts of a call, as a real collector receives it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fakes.collector import Collector, Span, within_a_minute
from fakes.cri import Client, container, pod, served
from fakes.metrics import one, scraped
from fakes.proxy import Proxy

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.app.measuring import measured, traced
from virtshim.config.settings import Metrics, Tracing
from virtshim.metrics.span_sender import Sending

pytestmark = pytest.mark.operator

# Trace headers as kubelet's otelgrpc sends them: sampled, and not sampled.
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
UNSAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="tr-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def collector(directory: Path) -> Iterator[Collector]:
    with Collector(directory) as collector:
        yield collector


def named(spans: list[Span], name: str, service: str = "virtshim") -> Span:
    (found,) = [span for span in spans if (span.name, span.service) == (name, service)]
    return found


def start_a_pod(client: Client, metadata: tuple[tuple[str, str], ...], name: str = "web") -> None:
    sandbox = client.runtime.RunPodSandbox(
        pb.RunPodSandboxRequest(config=pod(name), runtime_handler="virtshim"), timeout=60, metadata=metadata
    ).pod_sandbox_id
    made = client.runtime.CreateContainer(
        pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=container()), timeout=60, metadata=metadata
    ).container_id
    client.runtime.StartContainer(pb.StartContainerRequest(container_id=made), timeout=60, metadata=metadata)


def test_kubelets_trace_goes_through_the_proxy_into_each_part_of_a_start(
    tmp_path: Path, directory: Path, collector: Collector
) -> None:
    tracing = f'[tracing]\nendpoint = "{collector.endpoint}"\n'
    with served(tmp_path) as (world, _, address), traced(Tracing(endpoint=collector.endpoint)):
        world.pull()
        proxy = Proxy(directory, f"{directory}/nobody.sock", address, others=tracing)
        proxy._config.write_text(proxy._config.read_text().replace('handlers = ["vm"]', 'handlers = ["virtshim"]'))
        with proxy:
            start_a_pod(proxy.client, SAMPLED)
    within_a_minute(lambda: {"virtshim", "virtshim-proxy"} <= {span.service for span in collector.spans()})
    within_a_minute(lambda: any(span.name == "libvirt" for span in collector.spans()))
    spans = [span for span in collector.spans() if span.trace == TRACE]
    for method, parts in (
        ("RunPodSandbox", {"network"}),
        ("CreateContainer", {"admission", "devices", "disk", "seed", "empty_disks", "define"}),
        ("StartContainer", {"cgroup", "volumes", "libvirt"}),
    ):
        ours = named(spans, f"runtime.v1.RuntimeService/{method}")
        between = named(spans, f"runtime.v1.RuntimeService/{method}", "virtshim-proxy")
        assert between.parent == PARENT
        assert ours.parent == between.id
        assert {span.name for span in spans if span.parent == ours.id} == parts
        assert "rpc.response.status_code: Str(OK)" in ours.text


def test_a_trace_that_the_caller_does_not_sample_is_not_recorded(tmp_path: Path, collector: Collector) -> None:
    with served(tmp_path) as (world, client, _), traced(Tracing(endpoint=collector.endpoint)):
        world.pull()
        start_a_pod(client, UNSAMPLED)
        client.containers()  # kubelet repeats it for ever: it begins no trace
        start_a_pod(client, (), "other")
    within_a_minute(lambda: any(span.name == "libvirt" for span in collector.spans()))
    spans = collector.spans()
    assert TRACE not in {span.trace for span in spans}
    assert named(spans, "runtime.v1.RuntimeService/StartContainer").parent == ""
    assert "runtime.v1.RuntimeService/ListContainers" not in {span.name for span in spans}


def test_spans_have_errors_but_no_contents_of_requests(tmp_path: Path, collector: Collector) -> None:
    with served(tmp_path) as (world, client, _), traced(Tracing(endpoint=collector.endpoint)):
        world.outside.networks.plugin_error = "secret words of a plugin"
        with pytest.raises(grpc.RpcError):
            start_a_pod(client, SAMPLED, "name-of-a-pod")
    within_a_minute(lambda: any(span.name == "network" for span in collector.spans()))
    spans = collector.spans()
    assert "STATUS_CODE_ERROR" in named(spans, "network").text
    assert "STATUS_CODE_ERROR" in named(spans, "runtime.v1.RuntimeService/RunPodSandbox").text
    assert not any("secret words" in span.text or "name-of-a-pod" in span.text for span in spans)


def test_a_hung_collector_blocks_nothing_and_lost_spans_are_counted(tmp_path: Path, directory: Path) -> None:
    hurried = Sending(room=4, export=1, last=0.1)
    path = f"{directory}/m"
    # It accepts connections and never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent, served(tmp_path) as (world, client, _):
        world.outside.clock.held = True
        world.pull()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with measured(world.app, Metrics(address=f"unix:{path}")), traced(Tracing(endpoint=endpoint), hurried):
            for number in range(5):
                start_a_pod(client, SAMPLED, f"pod-{number}")
            assert one(scraped(path), "virtshim_trace_spans_total", result="dropped") > 0
            within_a_minute(lambda: 'virtshim_trace_spans_total{result="refused"}' in scraped(path))


def test_without_a_collector_nothing_is_loaded() -> None:
    program = """
import sys
sys.modules["rich"] = None
import virtshim.app.serve, virtshim.proxy.serving
from virtshim.app.measuring import traced
from virtshim.config.settings import Tracing
with traced(Tracing()):
    print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
