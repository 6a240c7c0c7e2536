"""What a daemon says: passed on as it comes, and its last lines kept for whoever has to tell why it does not come up."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import IO, Final

_KEPT: Final = 12
_LONGEST: Final = 2000
_PIECE: Final = 1 << 16


class LastLines:
    """`out`: the descriptor that all of it goes to. A start begins anew."""

    def __init__(self, out: int = 2) -> None:
        self._out = out
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._thread: threading.Thread | None = None

    def follow(self, said: IO[bytes]) -> None:
        """Until its end."""
        self._lines.clear()
        self._thread = threading.Thread(target=self._run, args=(said,), name="last-lines", daemon=True)
        self._thread.start()

    def lines(self, patience: float = 2.0) -> list[str]:
        """Of a daemon that has ended. What it has left behind may have its output open still: that is not waited for."""
        if self._thread is not None:
            self._thread.join(patience)
        return [line[:_LONGEST] for line in list(self._lines) if line.strip()]

    def _run(self, said: IO[bytes]) -> None:
        rest = b""
        with said:
            while piece := os.read(said.fileno(), _PIECE):
                with contextlib.suppress(OSError):  # a terminal that is gone
                    os.write(self._out, piece)
                *whole, rest = (rest + piece).split(b"\n")
                self._lines.extend(line.decode(errors="replace") for line in whole)
                rest = rest[-_LONGEST:]
        if rest:
            self._lines.append(rest.decode(errors="replace"))
