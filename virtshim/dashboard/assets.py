"""Finds the files of the web page: in the installed package, or in the build directory of a source tree."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from virtshim.model.errors import Unavailable

PAGE: Final = "index.html"
_HERE: Final = Path(__file__).resolve().parent


def assets_directory() -> Path:
    """The directory of the page's files. Raises Unavailable if they were never built."""
    for directory in (_HERE / "dist", _HERE.parent.parent / "build/dashboard/dist"):
        if (directory / PAGE).is_file():
            return directory
    raise Unavailable(
        "this installation has no dashboard, because its web page was not built. In the source tree, run "
        "make dashboard-assets (it needs npm), then install again"
    )
