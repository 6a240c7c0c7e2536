"""Power cuts lose what was written and not synced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from virtshim.store.writer import DatabaseWriter


class PowerCuts:
    """Keeps the state database as the last synced write left it."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self._kept: dict[Path, bytes] = {}
        self._lost = False
        commit = DatabaseWriter.commit

        def noted(writer: DatabaseWriter, *args: Any, synced: bool = True, **options: Any) -> int:
            changed = commit(writer, *args, synced=synced, **options)
            self._lost = not synced
            if synced:
                self._kept = {path: path.read_bytes() for path in self._files()}
            return changed

        patched.setattr(DatabaseWriter, "commit", noted)
        self.directory = Path()

    def _files(self) -> list[Path]:
        return [path for path in self.directory.glob("state.db*") if path.suffix != ".reserve"]

    def strike(self) -> bool:
        """Takes all writes since, once no process has the database open. Returns whether there were any."""
        if self._lost:
            for path in self._files():
                path.unlink()
            for path, content in self._kept.items():
                path.write_bytes(content)
        return self._lost
