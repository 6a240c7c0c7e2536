"""One machine, booted once: its story is told before the first test and judged by all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import outer
import pytest


@pytest.fixture(scope="session")
def told() -> Callable[[str], dict[str, Any]]:
    """What a step reported. A step that failed, or that an earlier one kept from being told, fails the test."""
    why = outer.missing()
    if why:
        pytest.skip(f"AREA devices NOT TESTED: {why}")
    steps = outer.run_story(seconds=2600)
    outer.REPORT.write_text(json.dumps(steps, indent=1), encoding="utf-8")
    for name, facts in steps.items():
        print(f"{facts['at']:7.1f} s  {name} ({facts['seconds']:.1f} s)")

    def step(name: str) -> dict[str, Any]:
        failed = {other: facts["error"] for other, facts in steps.items() if "error" in facts}
        assert name in steps, f"the story ended before: {failed}"
        assert "error" not in steps[name], steps[name]["error"]
        return steps[name]

    return step
