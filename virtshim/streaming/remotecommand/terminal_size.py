"""The resize stream: JSON objects one after another, `{"Width":80,"Height":24}`. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

_MAX_PENDING: Final = 4096
_MAX: Final = 0xFFFF  # struct winsize holds 16 bits


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    height: int


class SizeReader:
    """Nonsense is thrown away: a wrong size is no reason to end somebody's shell."""

    def __init__(self) -> None:
        self._text = ""
        self._decoder = json.JSONDecoder()

    def feed(self, data: bytes) -> Size | None:
        """The newest whole size in what came, if there is one."""
        text = self._text + data.decode("ascii", errors="replace")
        if len(text) > _MAX_PENDING:
            # The newest is at the end, and all sessions wait while this is read.
            text = text[text.find("{", len(text) - _MAX_PENDING) :]
        newest, place = None, 0
        while place < len(text):
            if text[place].isspace():
                place += 1
                continue
            try:
                value, place = self._decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                break
            newest = _size(value) or newest
        self._text = _pending(text[place:])
        return newest


def _pending(text: str) -> str:
    """What may still become an object; the rest is nonsense."""
    return text if text.startswith("{") and len(text) < _MAX_PENDING else ""


def _size(value: object) -> Size | None:
    if not isinstance(value, dict):
        return None
    width, height = value.get("Width"), value.get("Height")
    if isinstance(width, int) and isinstance(height, int) and 0 < width <= _MAX and 0 < height <= _MAX:
        return Size(width, height)
    return None
