"""`make bench` runs: a round of what starts VMs and boots guests, so that what breaks it is seen before its next use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.operator]

PROJECT = Path(__file__).resolve().parents[2]


def test_one_round_measures_starts_and_boots(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.bench", "--rounds", "1", "--only", "starts,boot", "--output", str(output)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())["figures"]
    for key in ("start_vs_bare_libvirt", "start_vs_qemu", "own_time_ms", "create_ms", "boot_ratio", "exec_true_ms"):
        assert figures[key]["min"] > 0
        assert key in done.stdout


def test_a_section_that_does_not_exist_is_named_with_those_that_do() -> None:
    command = [sys.executable, "-m", "tests.bench", "--only", "starts,stops"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no section stops; there are starts, pods" in done.stderr
