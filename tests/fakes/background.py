"""A call on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fakes.journal import WAIT_LIMIT


class Background:
    """Starts at once. `done` waits for the end and returns the result, or raises the call's exception."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._result: object = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self._result = call()
        except Exception as error:  # noqa: BLE001  raised again by `done`
            self._error = error

    def ended_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def done(self) -> object:
        self._thread.join(WAIT_LIMIT)
        assert not self._thread.is_alive(), "the call never returned"
        if self._error is not None:
            raise self._error
        return self._result
