"""One machine, booted once: its story runs before the first test, and all tests check its report."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import outer
import pytest

_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def told(request: pytest.FixtureRequest) -> Callable[[str], dict[str, Any]]:
    """The report of a step. A step that failed, or that an earlier failure prevented, fails the test."""
    why = outer.missing()
    if why:
        pytest.skip(f"AREA devices NOT TESTED: {why}")
    faulthandler.cancel_dump_traceback_later()  # the story takes longer than any other test
    # The chapters of the test files that run, in full if one of their tests asks for that.
    judges = [item for item in request.session.items if item.path.parent == _HERE]
    chapters = sorted({item.path.stem.removeprefix("test_") for item in judges})
    full = any(item.get_closest_marker("full") for item in judges)
    steps = outer.run_story(chapters, full=full, seconds=2600)
    outer.REPORT.write_text(json.dumps(steps, indent=1), encoding="utf-8")
    for name, facts in steps.items():
        print(f"{facts['at']:7.1f} s  {name} ({facts['seconds']:.1f} s)")

    def step(name: str) -> dict[str, Any]:
        failed = {other: facts["error"] for other, facts in steps.items() if "error" in facts}
        assert name in steps, f"the story has no such step, or ended before it: {failed}"
        assert "error" not in steps[name], steps[name]["error"]
        return steps[name]

    return step
