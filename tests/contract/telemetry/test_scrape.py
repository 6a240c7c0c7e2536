"""Prometheus can scrape the daemon that serves CRI."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from fakes.cri import Client, refused, served
from fakes.described_metrics import OF_BOTH, OF_PROCESS, RECORDED
from fakes.metrics import asked, one, scraped, values
from fakes.waiting import eventually
from fakes.world import World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.app.measuring import measured
from virtshim.config.settings import Metrics
from virtshim.guest.ports import GuestFilesystem
from virtshim.metrics.guest_filesystems import GuestFilesystems
from virtshim.metrics.metrics_server import MetricsServer
from virtshim.metrics.node import (
    CNI_SECONDS,
    OF_NODE,
    OF_SCRAPE,
    OF_VMS,
    POD_FAMILIES,
    POD_LABELS,
    VM_FAMILIES,
    VM_LABELS,
)
from virtshim.model.ids import ContainerId, ImageDigest, SandboxId
from virtshim.model.network import PluginRuns
from virtshim.model.sandbox import vm_disk_name
from virtshim.moves.values import SavedState, VmRecord
from virtshim.system.threads import lasting

pytestmark = pytest.mark.operator

SECONDS = 60.0


class Node:
    def __init__(self, world: World, client: Client, path: str) -> None:
        self.world = world
        self.client = client
        self.path = path

    def ask(self, target: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str, str]:
        return asked(self.path, target, method, **headers)

    def scrape(self) -> str:
        return scraped(self.path)

    def later(self) -> None:
        """Makes the next scrape take a new reading."""
        self.world.outside.clock.advance(2.0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with served(tmp_path) as (world, client, address):
        world.outside.clock.held = True
        world.pull()
        path = f"{address}.metrics"
        with measured(world.app, Metrics(address=f"unix:{path}")):
            yield Node(world, client, path)


def names(text: str) -> dict[str, str]:
    """All families with their kinds."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian: prometheus) is not installed")
def test_promtool_finds_no_fault(node: Node) -> None:
    node.client.running()
    node.world.outside.networks.ran.append(PluginRuns("ADD", "bridge", 1, 0.5, ((0.1, 1), (float("inf"), 2))))
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=node.scrape(), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_served_metrics_match_their_descriptions_and_labels(node: Node) -> None:
    sandbox, _ = node.client.running()
    node.world.outside.networks.ran.append(PluginRuns("ADD", "bridge", 1, 0.5, ((0.1, 1), (float("inf"), 2))))
    text = node.scrape()
    own = (*RECORDED, *OF_NODE, *OF_SCRAPE, CNI_SECONDS, *OF_PROCESS, *OF_BOTH)
    of_vms = (*VM_FAMILIES, *OF_VMS)
    assert names(text) == {one.name: one.kind for one in (*own, *POD_FAMILIES, *of_vms)}
    labels = {one.name: one.labels for one in own}
    labels |= {one.name: (*POD_LABELS, *one.labels) for one in POD_FAMILIES}
    labels |= {one.name: (*VM_LABELS, *one.labels) for one in of_vms}
    for name, found in values(text):
        family = re.sub(r"_(bucket|count|sum)$", "", name) if name not in labels else name
        assert {label for label, _ in found} - {"le"} == set(labels[family]), name
    assert sandbox in text


def test_saved_memory_is_counted_with_its_limit_where_there_is_one(node: Node) -> None:
    about = "virtshim_saved_states", "virtshim_saved_bytes"
    text = node.scrape()
    assert [one(text, name) for name in about] == [0, 0]
    assert "\nvirtshim_saved_bytes_limit " not in text
    live, saved = node.world.app.live.saved, node.world.app.adapters.files.vms
    live.now = dataclasses.replace(live.now, most=1 << 30)
    state = SavedState(ContainerId("c" * 64), SandboxId("d" * 64), 1, 4096, ContainerId("c" * 64))
    for name in ("a", "b"):
        disk = vm_disk_name("default", name, "vm")
        saved.put(VmRecord(disk, "default", name, "vm", ImageDigest(f"sha256:{'a' * 64}"), 1, saved=state))
    node.later()
    text = node.scrape()
    assert [one(text, name) for name in (*about, "virtshim_saved_bytes_limit")] == [2, 8192, 1 << 30]
    Path(saved.memory(disk)).with_name("vm.json").write_bytes(b"no JSON")
    node.later()
    text = node.scrape()
    assert not re.findall(r"^virtshim_saved_\w+ ", text, re.MULTILINE), "unknown is not zero"
    assert one(text, "virtshim_up", part="database") == 1


def test_templates_are_counted_with_their_limit_and_starts_by_how_they_went(node: Node) -> None:
    world, client = node.world, node.client
    sizes = "virtshim_templates", "virtshim_template_bytes", "virtshim_template_bytes_limit"
    hows = "warm", "not_allowed", "unsuitable", "no_template", "unfit", "failed"

    def started(name: str, **annotations: str) -> None:
        asked = {"virtshim.io/warm-start": "true", **annotations}
        client.start(client.create(client.run(name, annotations=asked)))

    def counts() -> list[float]:
        return [one(text, "virtshim_warm_starts_total", result=how) for how in hows]

    text = node.scrape()
    assert [one(text, name) for name in sizes] == [0, 0, 0]
    assert counts() == [0, 0, 0, 0, 0, 0]
    started("refused")
    world.app.live.template_bytes.now = 8 << 30
    world.outside.clock.held = False  # a template's guest becomes quiet
    started("lasting", **{"virtshim.io/vm": "lasting"})
    started("first")
    eventually(world.app.warm.templates.kept)
    world.outside.clock.held = True
    started("second")
    node.later()
    text = node.scrape()
    assert counts() == [1, 1, 1, 1, 0, 0]
    number, size, limit = (one(text, name) for name in sizes)
    assert (number, limit) == (1, 8 << 30)
    assert 0 < size < limit
    world.outside.guests.script_result = lambda _guest: (91, "no random numbers")
    started("third")
    started("fourth")
    node.later()
    text = node.scrape()
    assert counts() == [1, 1, 1, 1, 1, 1]
    assert one(text, "virtshim_templates") == 0


def test_metrics_of_a_vm_name_its_pod_and_have_fractions_of_seconds(node: Node) -> None:
    _, container = node.client.running("web")
    about = {"namespace": "default", "pod": "web", "container": "vm", "id": container}
    text = node.scrape()
    assert one(text, "virtshim_vmi_cpu_usage_seconds_total", **about) == pytest.approx(0.1)
    assert one(text, "virtshim_vmi_storage_read_times_seconds_total", **about, drive="vda") == pytest.approx(0.001)
    assert one(text, "virtshim_vmi_info", **about) == 1
    assert one(text, "virtshim_vmi_trouble", **about) == 0
    assert (
        one(text, "virtshim_vmi_network_receive_bytes_total", namespace="default", pod="web", interface="eth0") == 1000
    )
    assert one(text, "virtshim_vmis", phase="running") == 1
    assert one(text, "virtshim_pods", state="ready") == 1


def test_troubles_of_a_vm_are_reported_by_kind_while_they_last(node: Node) -> None:
    _, container = node.client.running("web")
    actions = node.world.app.operator.services.actions
    assert "virtshim_vm_troubles{" not in node.scrape()
    actions.pause(node.world.container(ContainerId(container)))
    node.world.app.watch.look()
    node.later()
    assert one(node.scrape(), "virtshim_vm_troubles", pod="web", id=container, kind="paused") == 1
    actions.resume(node.world.container(ContainerId(container)))
    node.later()
    assert "virtshim_vm_troubles{" not in node.scrape()


def test_calls_are_counted_by_method_and_code(node: Node) -> None:
    node.client.running()
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        node.client.RunPodSandbox(pb.RunPodSandboxRequest())
    text = node.scrape()
    count = "virtshim_rpc_duration_seconds_count"
    assert one(text, count, method="RunPodSandbox", code="OK") == 1
    assert one(text, count, method="RunPodSandbox", code="INVALID_ARGUMENT") == 1
    assert one(text, count, method="StartContainer", code="OK") == 1
    assert one(text, "virtshim_rpcs_running") == 0


def test_each_phase_of_a_start_is_timed_even_if_it_failed(node: Node) -> None:
    node.client.running()
    node.world.outside.networks.plugin_error = "no lemons left"
    with refused(grpc.StatusCode.INTERNAL):
        node.client.run("other")
    text = node.scrape()
    count = "virtshim_start_phase_duration_seconds_count"
    for phase in ("admission", "devices", "disk", "seed", "empty_disks", "define", "cgroup", "volumes", "libvirt"):
        assert one(text, count, phase=phase, result="ok") == 1, phase
    assert one(text, count, phase="network", result="ok") == 1
    assert one(text, count, phase="network", result="internal") == 1


def test_pulls_are_counted_by_result(node: Node) -> None:
    node.world.pull("registry.test/vm/other:1", b"another disk")
    with refused(grpc.StatusCode.NOT_FOUND):
        node.client.pull("registry.test/vm/absent:1")
    text = node.scrape()
    count = "virtshim_image_pull_duration_seconds_count"
    assert one(text, count, result="ok") == 1
    assert one(text, count, result="not-found") == 1
    assert one(text, "virtshim_image_pull_bytes_total") == len(b"another disk")
    assert one(text, "virtshim_image_pulls_running") == 0


def test_guest_exits_are_counted_by_reason(node: Node) -> None:
    _, container = node.client.running()
    node.client.stop(container)
    text = node.scrape()
    assert one(text, "virtshim_vmi_exits_total", reason="Error") == 1
    assert one(text, "virtshim_vmis", phase="exited") == 1
    assert "virtshim_vmi_info{" not in text


def test_tapmanagers_counts_of_cni_plugins_are_served(node: Node) -> None:
    node.world.outside.networks.ran.append(PluginRuns("DEL", "bridge", 1, 0.5, ((0.1, 1), (float("inf"), 2))))
    text = node.scrape()
    about = {"command": "DEL", "plugin": "bridge"}
    assert one(text, "virtshim_cni_duration_seconds_bucket", **about, le="0.1") == 1
    assert one(text, "virtshim_cni_duration_seconds_bucket", **about, le="+Inf") == 2
    assert one(text, "virtshim_cni_duration_seconds_sum", **about) == 0.5
    assert one(text, "virtshim_cni_errors_total", **about) == 1


def test_a_missing_part_is_reported_and_the_other_metrics_are_served(node: Node) -> None:
    node.client.running()
    node.world.outside.networks.gone = True
    node.world.outside.readings.hung = True
    text = node.scrape()
    assert one(text, "virtshim_up", part="network") == 0
    assert one(text, "virtshim_up", part="database") == 1
    assert one(text, "virtshim_vmi_info", pod="web") == 1
    assert "virtshim_vmi_vcpu_seconds_total{" not in text


@pytest.mark.hostile
def test_a_dead_thread_is_reported(node: Node) -> None:
    over = threading.Event()
    runs = lasting(lambda: over.wait(20), "test-runs")
    lasting(lambda: 1 // 0, "test-dies").join(20)
    text = node.scrape()
    over.set()
    runs.join(20)
    assert [one(text, "virtshim_thread_up", thread=name) for name in ("test-runs", "test-dies")] == [1, 0]
    assert "test-runs" not in node.scrape(), "one that was told to end is not missed"
    lasting(lambda: None, "test-dies").join(20)


def test_a_pod_name_cannot_forge_other_series(node: Node) -> None:
    name = 'x"} 1\nvirtshim_up{part="forged"} 0\n\\' + "y" * 1000
    node.world.run(name)
    text = node.scrape()
    assert 'part="forged"} 0\n' not in text
    (found,) = [
        dict(labels)["pod"] for (of, labels) in values(text) if of == "virtshim_vmi_network_receive_bytes_total"
    ]
    assert len(found) < 300
    assert found.startswith('x"} 1\\nvirtshim_up')


def test_guest_file_systems_are_read_from_the_agent_only_while_metrics_are_scraped(node: Node) -> None:
    clock = node.world.outside.clock
    _, container = node.client.running()
    clock.until_waiting()
    assert "virtshim_vmi_filesystem_used_bytes{" not in node.scrape()
    for _ in range(2):
        clock.advance(6.0)
        clock.until_waiting()
    about = {"id": container, "mount_point": "/", "disk_name": "vda1", "file_system_type": "ext4"}
    assert one(node.scrape(), "virtshim_vmi_filesystem_used_bytes", **about) == 1 << 20
    assert one(node.scrape(), "virtshim_vmi_filesystem_capacity_bytes", **about) == 4 << 20


def test_metrics_of_a_guests_file_systems_end_with_the_guest(tmp_path: Path) -> None:
    world = World(tmp_path)
    _, container = world.running()
    known = GuestFilesystems(world.records, world.outside.guests, world.outside.clock)
    assert known.filesystems(container) == ()  # somebody wants to know
    known.look(threading.Event())
    assert known.filesystems(container) != ()
    world.stop(container)
    known.look(threading.Event())
    assert known.filesystems(container) == ()
    world.close()


@pytest.mark.hostile
def test_a_guest_with_endless_mounts_gets_a_bounded_number_of_series(node: Node) -> None:
    clock, guests = node.world.outside.clock, node.world.outside.guests
    node.client.running()
    seen = set()
    for turn in range(6):
        guests.mounted = tuple(GuestFilesystem(f"/{turn}/{one}", "ext4", "vda", 1, 2) for one in range(16))
        node.scrape()
        for _ in range(2):
            clock.until_waiting()
            clock.advance(70.0)
        clock.until_waiting()
        seen |= set(re.findall(r'filesystem_used_bytes\{.*mount_point="([^"]+)"', node.scrape()))
    assert len(seen) == 32


def test_concurrent_scrapes_share_one_reading(node: Node) -> None:
    node.client.running()
    readings = node.world.outside.readings
    node.later()
    before = readings.calls
    with ThreadPoolExecutor(6) as pool:
        assert len({one(text, "virtshim_vmi_info") for text in pool.map(lambda _: node.scrape(), range(6))}) == 1
    assert readings.calls == before + 1


def test_while_a_reading_hangs_the_last_one_is_served_and_marked(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.client.running()
    assert one(node.scrape(), "virtshim_scrape_late") == 0
    hanging, over = threading.Event(), threading.Event()
    usage = type(node.world.outside.readings).usage

    def hang(*args: object) -> object:
        hanging.set()
        assert over.wait(SECONDS)
        return usage(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(type(node.world.outside.readings), "usage", hang)
    monkeypatch.setattr("virtshim.metrics.node.LIMIT", 0.2)
    try:
        node.later()
        text = node.scrape()
        assert hanging.is_set()
        assert one(text, "virtshim_scrape_late") == 1
        assert one(text, "virtshim_scrape_sample_age_seconds") >= 2
        assert one(text, "virtshim_vmi_info", pod="web") == 1
    finally:
        over.set()


def test_other_paths_and_methods_are_refused(node: Node) -> None:
    assert node.ask("/")[0] == 404
    assert node.ask("/metrics/../etc/passwd")[0] == 404
    assert node.ask("/debug/pprof")[0] == 404
    assert node.ask("/metrics", "POST")[0] == 405
    status, kind, _ = node.ask("/metrics?name[]=virtshim_up")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")


def test_openmetrics_is_served_on_request(node: Node) -> None:
    _, kind, text = node.ask(Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[MetricsServer, Callable[[], socket.socket]]]:
    server = MetricsServer("127.0.0.1:0", lambda _: ("text/plain", b"x" * (4 << 20)))
    server.start()
    try:
        yield server, lambda: socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    finally:
        server.stop()


def received(connection: socket.socket) -> bytes:
    with connection:
        data = b""
        while piece := connection.recv(1 << 16):
            data += piece
    return data


@pytest.mark.hostile
@pytest.mark.parametrize(
    "words", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 40000]
)
def test_a_request_that_is_not_http_is_refused(
    server: tuple[MetricsServer, Callable[[], socket.socket]], words: bytes
) -> None:
    _, connect = server
    connection = connect()
    connection.sendall(words + b"\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):  # closed with bytes that nobody had read
        assert received(connection)[9:10] == b"4"


@pytest.mark.hostile
def test_silent_connections_make_room_for_requests(
    server: tuple[MetricsServer, Callable[[], socket.socket]],
) -> None:
    _, connect = server
    with contextlib.ExitStack() as silent:
        held = [silent.enter_context(connect()) for _ in range(8)]
        connection = connect()
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 200")
        assert held[0].recv(1) == b""


def test_the_daemon_works_if_the_metrics_address_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = MetricsServer(f"127.0.0.1:{taken.getsockname()[1]}", lambda _: ("text/plain", b""))
        server.start()
        server.stop()


def test_a_socket_left_by_a_killed_daemon_is_replaced_and_only_root_can_use_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = MetricsServer(f"unix:{path}", lambda _: ("text/plain", b""))
    server.start()
    assert path.stat().st_mode & 0o777 == 0o600
    server.stop()
    assert not path.exists()


def test_without_an_address_nothing_is_loaded_and_nothing_listens() -> None:
    program = """
import sys
sys.modules["rich"] = None
import virtshim.app.serve
from virtshim.app.measuring import measured
from virtshim.config.settings import Metrics
with measured(None, Metrics(address="")):
    unwanted = ("prometheus_client", "virtshim.metrics.daemons", "virtshim.metrics.node", "opentelemetry")
    print([name for name in sys.modules if name.startswith(unwanted)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
