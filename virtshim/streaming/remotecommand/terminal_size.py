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
        self._text += data.decode("ascii", errors="replace")
        newest = None
        while self._text:
            self._text = self._text.lstrip()
            try:
                value, end = self._decoder.raw_decode(self._text)
            except (ValueError, RecursionError):
                self._drop_nonsense()
                break
            self._text = self._text[end:]
            newest = _size(value) or newest
        return newest

    def _drop_nonsense(self) -> None:
        """What may still become an object is kept."""
        if not self._text.startswith("{") or len(self._text) > _MAX_PENDING:
            self._text = ""


def _size(value: object) -> Size | None:
    if not isinstance(value, dict):
        return None
    width, height = value.get("Width"), value.get("Height")
    if isinstance(width, int) and isinstance(height, int) and 0 < width <= _MAX and 0 < height <= _MAX:
        return Size(width, height)
    return None
