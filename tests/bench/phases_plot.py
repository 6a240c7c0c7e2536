"""Draws an SVG of the phases of starts: a bar for each start, divided into its phases with their milliseconds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_WIDTH, _LEFT, _BAR, _STEP, _TOP = 860, 90, 44, 70, 30
_COLOURS = ("#b8c4d0", "#4e79a7", "#59a14f", "#edc948", "#f28e2b", "#e15759", "#b07aa1", "#76b7b2")
# A narrower stretch has no room for its number.
_ROOM = 16


def draw(starts: Mapping[str, Mapping[str, float]]) -> str:
    """`starts`: name -> phase -> milliseconds, with the phases in order."""
    longest = max(sum(phases.values()) for phases in starts.values())
    scale = (_WIDTH - _LEFT - 70) / longest
    names = list(dict.fromkeys(name for phases in starts.values() for name in phases))
    height = _TOP + _STEP * len(starts) + 20 * -(-len(names) // 2) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18">A pod\'s start by phases, milliseconds</text>',
    ]
    for row, (start, phases) in enumerate(starts.items()):
        parts += _bar(_TOP + row * _STEP, start, phases, [_COLOURS[names.index(name) % 8] for name in phases], scale)
    for place, name in enumerate(names):
        x, y = _LEFT + place % 2 * 330, _TOP + _STEP * len(starts) + place // 2 * 20
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOURS[place % 8]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _bar(y: int, start: str, phases: Mapping[str, float], colours: list[str], scale: float) -> list[str]:
    middle = y + _BAR / 2 + 4
    parts = [f'<text x="{_LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(start)}</text>']
    x = float(_LEFT)
    for (name, ms), colour in zip(phases.items(), colours, strict=True):
        width = ms * scale
        title = f"<title>{escape(name)}: {ms:g} ms</title>"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}" stroke="white">{title}</rect>'
        )
        if width >= _ROOM:
            parts.append(f'<text x="{x + width / 2:.1f}" y="{middle:.0f}" text-anchor="middle">{ms:.0f}</text>')
        x += width
    parts.append(f'<text x="{x + 6:.1f}" y="{middle:.0f}">{sum(phases.values()):.0f}</text>')
    return parts
