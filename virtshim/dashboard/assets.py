"""Where the page's files are: in the package, as installed, or where a checkout builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from virtshim.model.errors import Unavailable

PAGE: Final = "index.html"
_HERE: Final = Path(__file__).resolve().parent


def assets_directory() -> Path:
    """Raises Unavailable if they were never built."""
    for directory in (_HERE / "dist", _HERE.parent.parent / "build/dashboard/dist"):
        if (directory / PAGE).is_file():
            return directory
    raise Unavailable(
        "this installation has no dashboard: its page is built with npm, and was not. In the source tree: "
        "make dashboard-assets (it needs npm), then install again"
    )
