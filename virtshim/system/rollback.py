"""Undo steps, run in reverse order after a failure, each even if another fails."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

log = structlog.get_logger(__name__)


class Rollback:
    """`with Rollback() as undo: undo.add("what", step); ...; undo.commit()`.

    Register a step before the work that it undoes if that work may fail halfway. After the block, `clean` says whether every undo
    step worked.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []
        self.clean = True

    def add(self, what: str, step: Callable[[], object]) -> None:
        self._steps.append((what, step))

    def commit(self) -> None:
        self._steps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        while self._steps:
            what, step = self._steps.pop()
            try:
                step()
            except Exception as exc:  # noqa: BLE001  one failed undo must not keep the others from running
                self.clean = False
                log.warning("rollback.failed", step=what, error=str(exc), because=str(error))
