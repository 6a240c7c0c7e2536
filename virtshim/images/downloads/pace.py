"""Whether a source sends enough to be waited for. Pure."""

from __future__ import annotations


class Pace:
    """`least`: bytes a second, over each `window` of seconds that was spent waiting for bytes. What is done with them takes as
    long as it likes."""

    def __init__(self, least: float, window: float) -> None:
        self._least = least
        self._window = window
        self._waited = 0.0
        self._came = 0

    def is_kept(self, count: int, waited: float) -> bool:
        """After so many bytes for which so many seconds were waited."""
        self._waited += waited
        self._came += count
        if self._waited < self._window:
            return True
        is_kept = self._came >= self._least * self._waited
        self._waited, self._came = 0.0, 0
        return is_kept
