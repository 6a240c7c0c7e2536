"""The benchmark draws its samples as plots, and compares two revisions."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from bench import beside_plot, promises_plot
from bench.compare import compared
from bench.figures import Figures

DOCS = Path(__file__).resolve().parents[2] / "docs"


def figure(median: float, unit: str = "ms") -> dict[str, Any]:
    return {"median": median, "p99": median * 2, "min": median / 2, "max": median * 2, "n": 3, "unit": unit}


def rounds(*pairs: tuple[float, float]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [({"a_ms": figure(old)}, {"a_ms": figure(new)}) for old, new in pairs]


def test_samples_of_another_process_count_with_ours() -> None:
    ours, theirs = Figures(), Figures()
    ours.add("a_ms", 1, "ms")
    theirs.add("a_ms", 3, "ms")
    ours.take(theirs)
    assert (ours.document()["a_ms"]["median"], ours.document()["a_ms"]["n"]) == (2, 2)


def test_revisions_are_compared_pair_by_pair() -> None:
    found = compared(rounds((10, 20), (100, 150), (10, 30)))["a_ms"]
    assert found.document()["ratio"] == 2
    assert found.verdict == "up"


@pytest.mark.parametrize("pairs", [[(10, 10.2), (10, 20)], [(10, 5), (10, 20)], [(0, 5), (0, 6)]])
def test_a_difference_must_be_in_each_pair_to_count(pairs: list[tuple[float, float]]) -> None:
    assert compared(rounds(*pairs))["a_ms"].verdict == ""


def test_a_figure_that_is_less_in_each_pair_is_down() -> None:
    assert compared(rounds((10, 5), (12, 6)))["a_ms"].verdict == "down"


def test_only_figures_that_both_revisions_have_are_compared() -> None:
    old, new = {"a_ms": figure(1), "b_ms": figure(1)}, {"b_ms": figure(2), "c_ms": figure(2)}
    assert [*compared([(old, new)])] == ["b_ms"]


def test_the_plot_shows_for_each_promise_whether_it_is_met() -> None:
    plot = promises_plot.draw({"create_ms": figure(10), "pull_ratio": figure(0.4, "ratio")})
    ET.fromstring(plot)
    assert "10 ms (5 to 20); goal ≤ 15" in plot
    assert "0.4 (0.2 to 0.8); goal ≥ 0.9" in plot
    assert plot.count("#2f7d4f") == plot.count("#c0392b") > 0
    assert plot.count("not measured") == len(promises_plot.PROMISES) - 2


def test_a_promise_about_the_slowest_sample_is_judged_by_it() -> None:
    plot = promises_plot.draw({"exit_event_p99_ms": figure(15)})
    assert "p99 30 ms" in plot
    assert "#c0392b" in plot


def test_a_value_far_beyond_its_goal_stays_on_the_plot() -> None:
    plot = promises_plot.draw({"create_ms": figure(1e9)})
    assert all(0 <= float(x) <= 860 for x in re.findall(r'(?:x|x1|x2|cx)="([0-9.e+-]+)"', plot))


def test_each_promise_that_is_plotted_is_in_the_list_of_promises() -> None:
    listed = set(re.findall(r"`([a-z0-9_]+)`", (DOCS / "PROMISES.md").read_text()))
    assert {one.key for one in promises_plot.PROMISES} <= listed


def test_the_published_plots_show_the_published_figures() -> None:
    figures = json.loads((DOCS / "promises.json").read_text())["figures"]
    assert (DOCS / "promises.svg").read_text() == promises_plot.draw(figures)
    assert (DOCS / "beside-containerd.svg").read_text() == beside_plot.draw(figures)


def test_each_promise_that_is_plotted_has_a_published_figure() -> None:
    figures = json.loads((DOCS / "promises.json").read_text())["figures"]
    assert {one.key for one in promises_plot.PROMISES} <= figures.keys()


def test_pods_beside_containers_are_drawn_by_call_and_by_memory() -> None:
    keys = [f"phase_{{}}_{call}_ms" for call in ("sandbox", "create", "start", "stop", "remove")]
    figures = {key.format(one): figure(10) for key in keys for one in ("pod", "containerd")}
    figures |= {f"{one}_memory_20_mib": figure(28, "MiB") for one in ("pod", "containerd")}
    plot = beside_plot.draw(figures)
    ET.fromstring(plot)
    assert plot.count("10 ms (5 to 20)") == 10
    assert plot.count("28 MiB (14 to 56)") == 2
