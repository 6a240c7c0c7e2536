"""The table of annotations in docs/hardware.md. Pure."""

from __future__ import annotations

from virtshim.domain.hardware.annotations import ANNOTATIONS


def table() -> str:
    """Markdown, as it is in the page."""
    rows = [f"| `{one.name}` | {one.values} | {one.default} | {one.meaning} |" for one in ANNOTATIONS]
    return "\n".join(["| annotation | values | default | meaning |", "|---|---|---|---|", *rows])
