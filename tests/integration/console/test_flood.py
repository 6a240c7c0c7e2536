"""A guest that floods its console with up to 50 MB/s costs bounded memory and disk, and others are served."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.cri import Client, served
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.logs.follower import ConsoleLogs
from virtshim.logs.tail import Pace
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.system.clock import SystemClock

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
    """The logs of both followed consoles."""
    consoles = ConsoleLogs(layout, SystemClock())
    paths = {container: tmp_path / container.short for container in (FLOOD, QUIET)}
    for container, path in paths.items():
        consoles.open(container, str(path))
    yield paths
    consoles.close()


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a CRI server in this process, as in the product."""
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


def until_line(path: Path, line: bytes) -> None:
    wait_until(lambda: path.exists() and line in path.read_bytes(), 60, f"{line!r} is in the log")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_console_flood_costs_bounded_memory_and_disk_and_others_are_served(
    layout: Layout, logs: dict[ContainerId, Path], client: Client, flood: Callable[[], None]
) -> None:
    raw, said = Path(layout.console_log(FLOOD)), 0

    def flooded() -> int:
        """The bytes of the flood so far."""
        return raw.stat().st_size if raw.exists() else 0

    def while_a_line_comes() -> int:
        """The bytes of the flood between a line's output on the other console and its arrival in that log."""
        nonlocal said
        said += 1
        line, before = b"line %d of the quiet one\n" % said, flooded()
        with open(layout.console_log(QUIET), "ab") as quiet:
            quiet.write(line)
        until_line(logs[QUIET], line)
        return flooded() - before

    def while_status_is_told() -> int:
        before = flooded()
        client.Status(pb.StatusRequest())
        return flooded() - before

    while_a_line_comes(), while_status_is_told()  # what is loaded once
    memory, began = resident(), time.monotonic()
    flood()
    until_line(logs[FLOOD], b"lazy dog")
    beside, most_memory, most_disk, lost = [], 0, 0, False
    while len(beside) < 100 or not lost:
        beside.append((while_a_line_comes(), while_status_is_told()))
        most_memory = max(most_memory, resident() - memory)
        most_disk = max(most_disk, raw.stat().st_blocks * 512)
        seconds, written = time.monotonic() - began, logs[FLOOD].stat().st_size
        assert written <= PACE.log_burst + PACE.log_rate * seconds + 4 * MIB
        lost = lost or PACE.backlog < flooded() - written  # from here on it must have dropped some
    line, status = (statistics.median(values) for values in zip(*beside, strict=True))
    print(
        f"of a flood of {flooded() / seconds / 1e6:.0f} MB/s came while another's line did: {line / MIB:.1f} MiB, while",
        f"Status was told: {status / MIB:.1f} MiB; memory +{most_memory / MIB:.1f} MiB, {most_disk / MIB:.0f} MiB of disk",
    )
    assert most_memory < 32 * MIB
    assert most_disk < PACE.backlog + 32 * MIB, "what is in the log, or lost, takes no space"
    assert line < RATE / 4
    assert status < RATE / 10
    until_line(logs[FLOOD], b"bytes of this console were dropped")
    assert re.search(rb"F virtshim: \d+ bytes of this console", logs[FLOOD].read_bytes())
