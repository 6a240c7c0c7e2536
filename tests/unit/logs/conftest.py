"""Consoles in a temporary directory, and ways to look at what became of them."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from virtshim.logs.follower import ConsoleLogs
from virtshim.logs.tail import Pace
from virtshim.model.ids import ContainerId
from virtshim.model.layout import Layout
from virtshim.system.clock import SystemClock

LINE = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z stdout ([FP]) (.*)", re.DOTALL)

PACE = Pace(flush_after=0.05, gap=0.002, retry_after=0.05, sweep_every=60.0)


@dataclass
class HandClock:
    """Goes on only when told."""

    at: float = 1000.0

    def now_ns(self) -> int:
        return int(self.at * 1e9)

    def monotonic(self) -> float:
        return self.at

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.is_set()


@dataclass
class Machine:
    """Raw logs as QEMU writes them, CRI logs as kubelet reads them."""

    root: Path
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout(str(self.root / "state"), str(self.root / "run"))

    def container(self, number: int = 1) -> ContainerId:
        return ContainerId(f"{number:020x}".ljust(64, "c"))

    def log_path(self, container: ContainerId) -> Path:
        return self.root / "pods" / container.short / "vm" / "0.log"

    def says(self, container: ContainerId, data: bytes) -> None:
        os.makedirs(self.layout.container_dir(container), exist_ok=True)
        with open(self.layout.console_log(container), "ab") as raw:
            raw.write(data)

    def position_path(self, container: ContainerId) -> Path:
        return Path(self.layout.console_position(container))

    def pieces(self, container: ContainerId) -> list[tuple[str, bytes]]:
        path = self.log_path(container)
        if not path.exists():
            return []
        text = path.read_bytes()
        found = []
        for line in text.split(b"\n")[:-1]:
            match = LINE.fullmatch(line)
            assert match, line[:200]
            found.append((match[1].decode(), match[2]))
        return found

    def text(self, container: ContainerId) -> bytes:
        """The lines glued as readers do."""
        return b"".join(content + (b"\n" if tag == "F" else b"") for tag, content in self.pieces(container))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def hand_clock() -> HandClock:
    return HandClock()


@pytest.fixture
def make_logs(machine: Machine) -> Iterator[Callable[[], ConsoleLogs]]:
    made: list[ConsoleLogs] = []

    def make(pace: Pace = PACE) -> ConsoleLogs:
        made.append(ConsoleLogs(machine.layout, SystemClock(), pace))
        return made[-1]

    yield make
    for logs in made:
        logs.close()


@pytest.fixture
def eventually() -> Callable[..., None]:
    def wait(condition: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            pause.wait(0.002)

    return wait
