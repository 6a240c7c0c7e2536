"""The README's first picture: a real run of `make demo`, as an animated SVG.

    python deploy/docs_site/recording.py record     runs the demo, and writes docs/demo.json and docs/demo.svg
    python deploy/docs_site/recording.py draw       draws docs/demo.svg again from docs/demo.json

Each line appears as in the run, with pauses of at most two seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "docs/demo.json"
PICTURE = ROOT / "docs/demo.svg"

_COLUMNS = 110
_PAUSE = 2.0
_LAST = 6.0  # seconds for the end, before the animation starts again
_CHARACTER, _LINE, _EDGE, _HEAD = 7.8, 18, 16, 34

# Seconds since the start, and the line.
Recording = Sequence[tuple[float, str]]


def record() -> Recording:
    """Raises CalledProcessError if the demo fails."""
    environment = {**os.environ, "COLUMNS": str(_COLUMNS), "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
    lines: list[tuple[float, str]] = [(0.0, "# make demo")]
    since = time.monotonic()
    with subprocess.Popen(
        [sys.executable, str(ROOT / "deploy/demo.py")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines.extend((round(time.monotonic() - since, 2), line.rstrip()[:_COLUMNS]) for line in process.stdout)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "deploy/demo.py", "\n".join(text for _, text in lines))
    return lines


def draw(recording: Recording) -> str:
    """Without animation, all lines are visible."""
    shown = _shown_at([at for at, _ in recording])
    whole = shown[-1] + _LAST
    width, height = round(_COLUMNS * _CHARACTER + 2 * _EDGE), _HEAD + _LINE * len(recording) + _EDGE
    rules, texts = [], []
    for number, ((_, text), at) in enumerate(zip(recording, shown, strict=True)):
        percent = 100 * at / whole
        rules.append(
            f"@keyframes l{number}{{0%{{opacity:0}}{percent:.2f}%{{opacity:0}}{percent + 0.01:.2f}%{{opacity:1}}}}"
        )
        y = _HEAD + _LINE * (number + 1) - 5
        texts.append(
            f'<text x="{_EDGE}" y="{y}" class="{_kind(text)}" style="animation-name:l{number}" xml:space="preserve">'
            f"{escape(text)}</text>"
        )
    dots = "".join(
        f'<circle cx="{20 + 18 * at}" cy="17" r="5.5" fill="{color}"/>'
        for at, color in enumerate(("#e5534b", "#c69026", "#57ab5a"))
    )
    font = "font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#adbac7;"
    animation = f"animation-duration:{whole:.2f}s;animation-iteration-count:infinite;animation-timing-function:step-end"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="A recording of make demo">'
    colors = (
        ".step{fill:#6cb6ff;font-weight:bold}.typed{fill:#f0f6fc;font-weight:bold}"
        ".guest{fill:#8b949e}.end{fill:#57ab5a;font-weight:bold}"
    )
    still = "@media (prefers-reduced-motion:reduce){text{animation:none}}"
    window = f'<rect width="{width}" height="{height}" rx="8" fill="#1c2128"/>{dots}'
    style = ["<style>", f"text{{{font}{animation}}}", colors, still, *rules, "</style>"]
    return "\n".join([head, *style, window, *texts, "</svg>", ""])


def _shown_at(times: Sequence[float]) -> list[float]:
    shown = [0.5]
    for before, at in itertools.pairwise(times):
        shown.append(round(shown[-1] + min(_PAUSE, max(0.05, at - before)), 2))
    return shown


def _kind(text: str) -> str:
    if text.startswith("# "):
        return "typed"
    if text.startswith("* "):
        return "step"
    if text.lstrip().startswith("|"):
        return "guest"
    return "end" if text.startswith("All of it works") else "said"


def main() -> None:
    if sys.argv[1:] == ["record"]:
        RECORDING.write_text(json.dumps(record(), indent=0) + "\n", encoding="utf-8")
    elif sys.argv[1:] != ["draw"]:
        sys.exit(str(__doc__))
    PICTURE.write_text(draw(json.loads(RECORDING.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
