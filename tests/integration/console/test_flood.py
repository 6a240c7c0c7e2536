"""One guest floods its console as fast as 50 MB/s: memory, disk, and the others beside it."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.cri import Client, served

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.crilog.follower import ConsoleLogs
from virtshim.crilog.tail import Pace
from virtshim.domain.ids import ContainerId
from virtshim.domain.layout import Layout
from virtshim.primitives.clock import SystemClock

FLOOD, QUIET = ContainerId("f" * 64), ContainerId("a" * 64)
MIB = 1 << 20
RATE = 50_000_000
PACE = Pace()  # the product's own


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(str(tmp_path / "state"), str(tmp_path / "run"))
    for container in (FLOOD, QUIET):
        os.makedirs(layout.container_dir(container))
    return layout


@pytest.fixture
def logs(layout: Layout, tmp_path: Path) -> Iterator[dict[ContainerId, Path]]:
    """Both consoles, followed."""
    consoles = ConsoleLogs(layout, SystemClock())
    paths = {container: tmp_path / container.short for container in (FLOOD, QUIET)}
    for container, path in paths.items():
        consoles.open(container, str(path))
    yield paths
    consoles.close()


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a CRI server in this very process, as in the product."""
    with served(tmp_path_factory.mktemp("node")) as (_, client, _):
        yield client


@pytest.fixture
def flood(layout: Layout) -> Iterator[Callable[[], None]]:
    started: list[subprocess.Popen[bytes]] = []
    script = str(Path(__file__).with_name("raw_flood.py"))

    def start() -> None:
        started.append(subprocess.Popen([sys.executable, script, layout.console_log(FLOOD), str(RATE)]))

    yield start
    for process in started:
        process.kill()
        process.wait()


def until_line(path: Path, line: bytes) -> float:
    """Seconds."""
    began, pause = time.monotonic(), threading.Event()
    while not path.exists() or line not in path.read_bytes():
        assert time.monotonic() - began < 20, "the line never came"
        pause.wait(0.001)
    return time.monotonic() - began


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_flood_costs_bounded_memory_and_disk_and_slows_nobody(
    layout: Layout, logs: dict[ContainerId, Path], client: Client, flood: Callable[[], None]
) -> None:
    said = 0

    def line_latency() -> float:
        nonlocal said
        said += 1
        line = b"line %d of the quiet one\n" % said
        with open(layout.console_log(QUIET), "ab") as raw:
            raw.write(line)
        return until_line(logs[QUIET], line)

    def status_latency() -> float:
        began = time.monotonic()
        client.Status(pb.StatusRequest())
        return time.monotonic() - began

    quiet = [(line_latency(), status_latency()) for _ in range(30)]
    memory, began = resident(), time.monotonic()
    flood()
    until_line(logs[FLOOD], b"lazy dog")
    beside, most_memory, most_disk = [], 0, 0
    raw, lost = Path(layout.console_log(FLOOD)), False
    while len(beside) < 100 or not lost:
        beside.append((line_latency(), status_latency()))
        most_memory = max(most_memory, resident() - memory)
        most_disk = max(most_disk, raw.stat().st_blocks * 512)
        seconds, written = time.monotonic() - began, logs[FLOOD].stat().st_size
        assert written <= PACE.log_burst + PACE.log_rate * seconds + 4 * MIB
        lost = lost or PACE.backlog < raw.stat().st_size - written  # from here on it must have lost some
        assert seconds < 60, f"{raw.stat().st_size} bytes in a minute are no flood"
    line, status = (statistics.median(values) for values in zip(*beside, strict=True))
    line_before, status_before = (statistics.median(values) for values in zip(*quiet, strict=True))
    rate = raw.stat().st_size / seconds
    print(
        f"flood of {rate / 1e6:.0f} MB/s: memory +{most_memory / MIB:.1f} MiB, raw log {most_disk / MIB:.0f} MiB on disk,",
        f"another's line {line_before * 1e3:.1f} -> {line * 1e3:.1f} ms,",
        f"Status {status_before * 1e3:.1f} -> {status * 1e3:.1f} ms",
    )
    assert most_memory < 32 * MIB
    assert most_disk < PACE.backlog + 32 * MIB, "what is in the log, or lost, takes no space"
    assert line < line_before + 0.25
    assert status < status_before + 0.05
    until_line(logs[FLOOD], b"bytes of this console were dropped")
    assert re.search(rb"F virtshim: \d+ bytes of this console", logs[FLOOD].read_bytes())
