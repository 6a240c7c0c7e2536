"""`make bench` works: the test runs one round of the sections that start VMs, and with `--all` those that boot guests.
So breakage shows before the next use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.operator]

PROJECT = Path(__file__).resolve().parents[2]


STARTS = (
    "machine_boot_ms",
    "machine_sync_ms",
    "machine_fork_ms",
    "start_vs_bare_libvirt",
    "start_vs_qemu",
    "own_time_ms",
    "create_ms",
)
BOOTS = ("boot_ratio", "exec_ratio")


@pytest.mark.parametrize(("section", "keys"), [("starts", STARTS), pytest.param("boot", BOOTS, marks=pytest.mark.full)])
def test_one_benchmark_round_produces_figures(tmp_path: Path, section: str, keys: tuple[str, ...]) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.bench", "--rounds", "1", "--only", section, "--output", str(output)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())["figures"]
    for key in keys:
        assert figures[key]["min"] > 0
        assert key in done.stdout


def test_an_unknown_section_is_refused_with_the_list_of_sections() -> None:
    command = [sys.executable, "-m", "tests.bench", "--only", "starts,stops"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no section stops; there are starts, pods" in done.stderr
