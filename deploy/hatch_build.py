"""Adds the dashboard's page, if it was built, to wheels and archives of the sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILT: Final = "build/dashboard/dist"
_INSTALLED: Final = "virtshim/dashboard/dist"


class DashboardPage(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """An editable installation finds the page where it was built."""
        built = Path(self.root, _BUILT)
        if version == "editable":
            return
        if not (built / "index.html").is_file():
            self.app.display_warning(
                "the dashboard's page is not included; build it with `make dashboard-assets` (npm)"
            )
            return
        build_data["force_include"][str(built)] = _INSTALLED if self.target_name == "wheel" else _BUILT
