"""Draws an SVG of promises: a line for each, with its goal, the median and the spread of one run. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True, slots=True)
class Promise:
    """`key`: of the figure. `label`: the plot's words for it. `of`: which of its numbers is promised."""

    key: str
    label: str
    goal: float
    at_least: bool = False
    of: str = "median"


PROMISES = (
    Promise("start_vs_bare_libvirt", "StartContainer / libvirt alone", 0.35),
    Promise("start_vs_qemu", "StartContainer / QEMU alone", 2.4),
    Promise("own_time_ms", "a pod's start, virtshim's own time", 42),
    Promise("pod_vs_containerd", "a pod's start / containerd", 1.5),
    Promise("pod_vs_containerd_20", "20 pods at once / containerd", 1.4),
    Promise("boot_ratio", "guest's boot / bare QEMU", 1.15),
    Promise("sandbox_own_ms", "RunPodSandbox without CNI", 30),
    Promise("attach_50_vs_containerd", "50 RunPodSandbox at once / containerd", 1.0),
    Promise("create_ms", "CreateContainer", 15),
    Promise("list_500_p99_ms", "lists with 500 pods", 10, of="p99"),
    Promise("status_busy_ms", "Status while 50 stops wait", 5),
    Promise("rss_200_mib", "daemons' memory with 200 pods", 160),
    Promise("rss_shares_200_mib", "memory of virtshim-shares", 20),
    Promise("rss_per_pod_kib", "memory for each further pod", 100),
    Promise("share_start_ms", "start of virtiofsd", 60),
    Promise("share_rss_mib", "memory of an idle virtiofsd", 8),
    Promise("share_io_ratio", "volume, in order / virtiofsd by hand", 1.15),
    Promise("share_io_random_ratio", "volume, random / virtiofsd by hand", 1.15),
    Promise("share_boot_ratio", "boot with a volume / without", 1.15),
    Promise("vmwrapper_ms", "vmwrapper", 17),
    Promise("jail_ms", "confining QEMU", 5),
    Promise("exit_event_p99_ms", "QEMU's end to the CRI event", 20, of="p99"),
    Promise("pull_ratio", "image pull / curl, sha256sum", 0.9, at_least=True),
    Promise("pull_gzip_ratio", "gzip layer / skopeo", 0.9, at_least=True),
    Promise("pull_zstd_ratio", "zstd layer / skopeo", 0.9, at_least=True),
    Promise("parallel_pull_gain", "pull, lossy link / one connection", 1.3, at_least=True),
    Promise("net_ratio", "TCP, guest to host / bare QEMU", 0.98, at_least=True),
    Promise("net_in_ratio", "TCP, host to guest / bare QEMU", 0.98, at_least=True),
    Promise("net_trips_ratio", "round trips / bare QEMU", 0.98, at_least=True),
    Promise("exec_true_ms", "ExecSync of true", 80),
    Promise("recover_200_s", "virtshim's restart with 200 pods", 3),
    Promise("proxy_added_ms", "proxy: time added to Version", 0.7),
    Promise("proxy_list_500_ratio", "proxy: list, 2 x 250 pods / direct", 1.1),
    Promise("proxy_list_500_one_ratio", "proxy: list, 500 of one / direct", 1.1),
)

_WIDTH, _LEFT, _RIGHT, _STEP, _TOP = 860, 260, 260, 24, 56
_MET, _MISSED = "#2f7d4f", "#c0392b"
# The range of the axis: a tenth of the goal to ten times the goal.
_DECADES = 1.0


def draw(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """`figures`: key -> median, min, max, p99, unit. A promise that was not measured is said to be so."""
    height = _TOP + _STEP * len(PROMISES) + 12
    goal = _x(1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="14">The promises and one run of make bench; "a / b" is a divided by b</text>',
        '<text x="10" y="40" fill="#555">dark line: the goal, left is better; further lines: factors of two; red: not met</text>',
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
    label = f'<text x="{_LEFT - 10}" y="{middle + 4}" text-anchor="end">{escape(promise.label)}</text>'
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
