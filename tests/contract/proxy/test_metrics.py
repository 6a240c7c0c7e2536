"""The proxy counts calls, and measures its own time without that of the runtimes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import grpc
import pytest
from fakes.cri import Client, refused
from fakes.described_metrics import OF_PROCESS, OF_PROXY
from fakes.metrics import one, scraped
from fakes.proxy import Proxy
from fakes.runtime import FakeRuntime, Refusal

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = [pytest.mark.proxy, pytest.mark.operator]

COUNT = "virtshim_proxy_rpc_duration_seconds_count"
OF_RUNTIMES = "virtshim_proxy_runtime_rpc_duration_seconds_count"


def counted(text: str, name: str, **labels: str) -> float:
    """The value of a series, 0 if it does not exist: the proxy serves other tests of this file, too."""
    with contextlib.suppress(ValueError):
        return one(text, name, **labels)
    return 0.0


def test_calls_are_counted_in_total_and_by_runtime(
    proxy: Proxy, client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    before = scraped(proxy.metrics)
    client.ListPodSandbox(pb.ListPodSandboxRequest())
    primary.answers["StartContainer"] = Refusal(grpc.StatusCode.NOT_FOUND, "no such thing")
    with refused(grpc.StatusCode.NOT_FOUND):
        client.start("0" * 64)
    text = scraped(proxy.metrics)

    def more(name: str, **labels: str) -> float:
        return counted(text, name, **labels) - counted(before, name, **labels)

    assert more(COUNT, method="ListPodSandbox", code="OK") == 1
    assert more(COUNT, method="StartContainer", code="NOT_FOUND") == 1
    assert more(OF_RUNTIMES, runtime="primary", method="StartContainer", code="NOT_FOUND") == 1
    assert more(OF_RUNTIMES, runtime="other", method="ListPodSandbox", code="OK") >= 1
    assert more("virtshim_proxy_added_seconds_count") == 2
    assert one(text, "virtshim_proxy_runtime_up", runtime="primary") == 1


def test_the_proxys_own_time_excludes_waiting_for_runtimes(
    proxy: Proxy, client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    whole, own = "virtshim_proxy_rpc_duration_seconds_sum", "virtshim_proxy_added_seconds_sum"
    before = scraped(proxy.metrics)
    for _ in range(5):
        client.ListContainers(pb.ListContainersRequest())
    text = scraped(proxy.metrics)
    took = one(text, whole, method="ListContainers") - counted(before, whole, method="ListContainers")
    assert 0 < one(text, own) - counted(before, own) < took


@pytest.mark.hostile
def test_invented_method_names_share_one_series(
    proxy: Proxy, client: Client, primary: FakeRuntime, other: FakeRuntime
) -> None:
    for number in range(5):
        primary.answers[f"MadeUp{number}"] = b"done"
        client.channel.unary_unary(f"/runtime.v2.RuntimeService/MadeUp{number}")(b"", timeout=20)
    text = scraped(proxy.metrics)
    assert "MadeUp" not in text
    assert one(text, COUNT, method="other", code="OK") >= 5


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian: prometheus) is not installed")
def test_metrics_match_their_descriptions_and_pass_promtool(proxy: Proxy, client: Client) -> None:
    client.ListPodSandbox(pb.ListPodSandboxRequest())
    text = scraped(proxy.metrics)
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    for described in (*OF_PROXY, *OF_PROCESS):
        assert f"# TYPE {described.name} {described.kind}\n" in text
