"""Draws an SVG of pods beside containers: each call's median and spread, and a pod's memory, on virtshim and on
containerd. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CALLS = {
    "sandbox": "RunPodSandbox",
    "create": "CreateContainer",
    "start": "StartContainer",
    "stop": "StopPodSandbox",
    "remove": "RemovePodSandbox",
}
_RUNTIMES = {"pod": ("virtshim", "#4e79a7"), "containerd": ("containerd with runc", "#b8c4d0")}
_WIDTH, _LEFT, _ROOM, _BAR, _STEP, _TOP = 860, 190, 190, 15, 44, 62


def draw(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """`figures`: those of one run; it reads `phase_RUNTIME_CALL_ms` and `RUNTIME_memory_20_mib`."""
    blocks = [(_CALLS[call], f"phase_{{}}_{call}_ms", " ms") for call in _CALLS]
    longest = max(float(figures[key.format(one)]["max"]) for _, key, _ in blocks for one in _RUNTIMES)
    memory = ("memory of a pod", "{}_memory_20_mib", " MiB")
    most = max(float(figures[memory[1].format(one)]["max"]) for one in _RUNTIMES)
    height = _TOP + _STEP * (len(blocks) + 1) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="14">A pod on virtshim and on containerd, same client and CNI: median (range)</text>',
    ]
    for place, (name, colour) in enumerate(_RUNTIMES.values()):
        parts.append(f'<rect x="{10 + place * 110}" y="32" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{28 + place * 110}" y="43">{name}</text>')
    for row, (label, key, unit) in enumerate(blocks):
        parts += _block(_TOP + row * _STEP, label, key, unit, figures, longest)
    # A line separates it, because its scale differs.
    line = _TOP + len(blocks) * _STEP
    parts.append(f'<line x1="10" y1="{line}" x2="{_WIDTH - 10}" y2="{line}" stroke="#ddd"/>')
    parts += _block(line + 10, *memory, figures, most)
    return "\n".join([*parts, "</svg>\n"])


def _block(
    y: int, label: str, key: str, unit: str, figures: Mapping[str, Mapping[str, Any]], longest: float
) -> list[str]:
    scale = (_WIDTH - _LEFT - _ROOM) / longest
    parts = [f'<text x="{_LEFT - 10}" y="{y + _BAR + 4}" text-anchor="end">{label}</text>']
    for place, (runtime, (_, colour)) in enumerate(_RUNTIMES.items()):
        figure = figures[key.format(runtime)]
        top = y + place * (_BAR + 1)
        middle = top + _BAR / 2
        low, median, high = (float(figure[name]) * scale for name in ("min", "median", "max"))
        told = f"{figure['median']:.3g}{unit} ({figure['min']:.3g} to {figure['max']:.3g})"
        parts += [
            f'<rect x="{_LEFT}" y="{top}" width="{median:.1f}" height="{_BAR}" fill="{colour}"/>',
            f'<line x1="{_LEFT + low:.1f}" y1="{middle}" x2="{_LEFT + high:.1f}" y2="{middle}" stroke="#333"/>',
            f'<text x="{_LEFT + max(high, median) + 6:.1f}" y="{middle + 4}">{told}</text>',
        ]
    return parts
