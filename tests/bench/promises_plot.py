"""Promises as an SVG: a line for each, with its goal, the median and the spread of one run. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True, slots=True)
class Promise:
    """`key`: of the figure. `of`: which of its numbers is promised."""

    key: str
    goal: float
    at_least: bool = False
    of: str = "median"


PROMISES = (
    Promise("start_vs_bare_libvirt", 0.35),
    Promise("start_vs_qemu", 1.6),
    Promise("own_time_ms", 50),
    Promise("pod_vs_containerd", 1.5),
    Promise("pod_vs_containerd_20", 1.5),
    Promise("boot_ratio", 1.15),
    Promise("sandbox_own_ms", 30),
    Promise("attach_50_vs_containerd", 1.0),
    Promise("create_ms", 15),
    Promise("list_500_p99_ms", 10, of="p99"),
    Promise("status_busy_ms", 5),
    Promise("rss_200_mib", 150),
    Promise("rss_per_pod_kib", 100),
    Promise("share_start_ms", 60),
    Promise("share_rss_mib", 8),
    Promise("share_io_ratio", 1.15),
    Promise("share_io_random_ratio", 1.15),
    Promise("share_boot_ratio", 1.15),
    Promise("vmwrapper_ms", 40),
    Promise("jail_ms", 5),
    Promise("exit_event_p99_ms", 20, of="p99"),
    Promise("pull_ratio", 0.9, at_least=True),
    Promise("pull_gzip_ratio", 0.9, at_least=True),
    Promise("pull_zstd_ratio", 0.9, at_least=True),
    Promise("net_ratio", 0.98, at_least=True),
    Promise("net_in_ratio", 0.98, at_least=True),
    Promise("net_trips_ratio", 0.98, at_least=True),
    Promise("exec_true_ms", 80),
    Promise("recover_200_s", 3),
    Promise("proxy_added_ms", 0.7),
    Promise("proxy_list_500_ratio", 1.1),
    Promise("proxy_list_500_one_ratio", 1.1),
)

_WIDTH, _LEFT, _RIGHT, _STEP, _TOP = 860, 200, 300, 24, 56
_MET, _MISSED = "#2f7d4f", "#c0392b"
# What is shown, in goals: a tenth of one to ten of them.
_DECADES = 1.0


def draw(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """`figures`: key -> median, min, max, p99, unit. A promise that was not measured is said to be so."""
    height = _TOP + _STEP * len(PROMISES) + 12
    goal = _x(1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="14">What is promised, and what one run of make bench showed</text>',
        '<text x="10" y="40" fill="#555">the line is the goal, left of it is better; each step a factor of two</text>',
        f'<line x1="{goal:.1f}" y1="{_TOP - 6}" x2="{goal:.1f}" y2="{height - 8}" stroke="#333"/>',
    ]
    for power in (-3, -2, -1, 1, 2, 3):
        x = _x(2.0**power)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{height - 8}" stroke="#e4e4e4"/>')
    for row, promise in enumerate(PROMISES):
        parts += _row(_TOP + row * _STEP, promise, figures.get(promise.key))
    return "\n".join([*parts, "</svg>\n"])


def _row(y: int, promise: Promise, figure: Mapping[str, Any] | None) -> list[str]:
    middle = y + 12
    sign = "≥" if promise.at_least else "≤"
    label = f'<text x="{_LEFT - 10}" y="{middle + 4}" text-anchor="end">{escape(promise.key)}</text>'
    if figure is None:
        told = f"not measured; goal {sign} {promise.goal:g}"
        return [label, f'<text x="{_WIDTH - _RIGHT + 20}" y="{middle + 4}" fill="#777">{told}</text>']
    value = float(figure[promise.of])
    met = value >= promise.goal if promise.at_least else value <= promise.goal
    colour = _MET if met else _MISSED
    ends = sorted(_x(_in_goals(promise, float(figure[end]))) for end in ("min", "max"))
    unit = "" if figure["unit"] == "ratio" else f" {figure['unit']}"
    name = "p99 " if promise.of == "p99" else ""
    told = f"{name}{value:.3g}{unit} ({figure['min']:.3g} to {figure['max']:.3g}); goal {sign} {promise.goal:g}"
    return [
        label,
        f'<line x1="{ends[0]:.1f}" y1="{middle}" x2="{ends[1]:.1f}" y2="{middle}" stroke="{colour}" opacity="0.6"/>',
        f'<circle cx="{_x(_in_goals(promise, value)):.1f}" cy="{middle}" r="5" fill="{colour}"/>',
        f'<text x="{_WIDTH - _RIGHT + 20}" y="{middle + 4}" fill="{colour}">{escape(told)}</text>',
    ]


def _in_goals(promise: Promise, value: float) -> float:
    """1 is the goal, less is better."""
    if promise.at_least:
        return promise.goal / value if value > 0 else 10**_DECADES
    return value / promise.goal


def _x(goals: float) -> float:
    """Logarithmic; what is beyond an end is shown at it."""
    shown = max(-_DECADES, min(_DECADES, math.log10(goals))) if goals > 0 else -_DECADES
    return _LEFT + (shown + _DECADES) / (2 * _DECADES) * (_WIDTH - _LEFT - _RIGHT)
