"""`make test` and `make test-all` use two processors by this plugin: `-p tests.gate --apart`.

Two pytest-xdist workers take test files from one queue, the longest first. Each worker runs inside `apart.sh`, so neither sees
the other's processes, links, mounts or temporary files. How long each file took is kept in `build/durations.json`, which orders
the next run's queue. `--began` adds the minutes of a whole run that passed to `build/test_minutes.json`."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

_APART = Path(__file__).with_name("apart.sh")
# A third worker would use the quarter of the time in which both processors wait for guests, and save two minutes. But
# two of four such runs failed, because some tests of saved VMs and of killed QEMUs do not bear that load.
_WORKERS = 2
# tmpfs: most tests with a database wait for SQLite's fsync. Tests of durability ask for a real disk (fixture `real_disk`).
_MEMORY = Path("/dev/shm")

# Directories whose files share one emulated machine: one worker takes all of a directory's files.
_UNDIVIDED = ("tests/vfio",)
# A file whose tests take minutes each with `--all`: both workers share it.
_ROWS = "tests/faults/test_kill_matrix.py"
# Seconds per test where no run has recorded any. A clean clone needs the order, not the figures.
_UNRECORDED = {
    "tests/vfio": 4.0,
    "tests/install": 900.0,
    "tests/e2e": 3.5,
    "tests/faults": 3.5,
    _ROWS: 60.0,
    "tests/integration": 0.6,
}
_UNRECORDED_ELSEWHERE = 0.05


def unit_of(nodeid: str) -> str:
    """The unit of a test: its file, or a directory that is not divided, or the test itself if it takes minutes."""
    file = nodeid.partition("::")[0]
    if file == _ROWS:
        return nodeid
    return next((top for top in _UNDIVIDED if file.startswith(f"{top}/")), file)


def room_of(unit: str) -> str:
    """The directory of a unit. Its files may share fixtures, such as a node, which a worker keeps while it stays there."""
    return unit if unit in _UNDIVIDED else str(PurePosixPath(unit.partition("::")[0]).parent)


def area_of(path: str) -> str:
    """`tests/e2e` for everything below it: some of its fixtures serve the directories below it, too."""
    return "/".join(path.split("/")[:2])


def expected_seconds(unit: str, tests: int, recorded: Mapping[str, float]) -> float:
    if unit in recorded:
        return recorded[unit]
    place = _ROWS if unit.startswith(_ROWS) else area_of(unit)
    return tests * _UNRECORDED.get(place, _UNRECORDED_ELSEWHERE)


def next_unit(waiting: Mapping[str, float], here: str | None, elsewhere: set[str]) -> str:
    """Which unit a worker takes next.

    `waiting`: seconds that each unit in the queue is expected to take. `here`: the room of the worker's last unit. `elsewhere`:
    the rooms of the other workers. A worker finishes its room before it leaves, and goes to one of the same area if there is any.
    Then it takes the room with the most work that no other worker is in, or helps in the longest one. Within a room the longest
    unit comes first.
    """
    rooms: dict[str, float] = defaultdict(float)
    for unit, seconds in waiting.items():
        rooms[room_of(unit)] += seconds

    def preference(name: str) -> tuple[bool, bool, bool, float]:
        return name == here, here is not None and area_of(name) == area_of(here), name not in elsewhere, rooms[name]

    room = max(rooms, key=preference)
    return max((unit for unit in waiting if room_of(unit) == room), key=lambda unit: waiting[unit])


class LongestFirst(LoadScopeScheduling):
    """xdist's distribution by file, with the queue in the order of `next_unit`."""

    def __init__(self, config: pytest.Config, log: Any, recorded: Mapping[str, float]) -> None:
        super().__init__(config, log)
        self._recorded = recorded

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        waiting = {unit: expected_seconds(unit, len(tests), self._recorded) for unit, tests in self.workqueue.items()}
        mine = list(self.assigned_work.get(node, ()))
        others = {
            room_of(list(units)[-1]) for other, units in self.assigned_work.items() if other is not node and units
        }
        chosen = next_unit(waiting, room_of(mine[-1]) if mine else None, others)
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)


class WorkersApart:
    """The controller's part of a run: starts the workers, orders the queue, records durations."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._kind = "test_all" if config.getoption("--all") else "test"
        self._durations = config.rootpath / "build" / "durations.json"
        self._recorded: dict[str, float] = _read(self._durations).get(self._kind, {})
        self._seconds: dict[str, float] = defaultdict(float)
        self._directory = tempfile.mkdtemp(prefix="t-", dir=_MEMORY)  # short: sockets below it have 108 characters
        config.option.basetemp = self._directory
        config.option.tx = [f"popen//python={_APART} {sys.executable}"] * _WORKERS
        config.option.dist = "loadfile"

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> LongestFirst:
        return LongestFirst(config, log, self._recorded)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[unit_of(report.nodeid)] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        took = {unit: round(seconds, 2) for unit, seconds in self._seconds.items()}
        _write(self._durations, {self._kind: {**_read(self._durations).get(self._kind, {}), **took}})
        began: float | None = self._config.getoption("--began")
        if began is not None and exitstatus == pytest.ExitCode.OK:
            key, minutes = f"{self._kind}_minutes", (time.time() - began) / 60
            file = self._durations.with_name("test_minutes.json")
            _write(file, {key: _figure([*_read(file).get(key, {}).get("runs", []), round(minutes, 2)][-3:])})
            terminalreporter.write_line(f"{key}: {minutes:.1f}")

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _figure(runs: list[float]) -> dict[str, Any]:
    median = statistics.median(runs)
    return {"median": median, "min": min(runs), "max": max(runs), "n": len(runs), "unit": "min", "runs": runs}


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _write(file: Path, changed: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(_read(file) | changed, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--apart", action="store_true", help="several workers, each apart from all else on this machine")
    parser.addoption("--began", type=float, help="when the whole run began, in seconds since 1970")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Runs before xdist reads its options."""
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--apart") and not is_worker:
        config.pluginmanager.register(WorkersApart(config), "workers-apart")
