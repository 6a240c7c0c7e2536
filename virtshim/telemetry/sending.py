"""How spans are sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sending:
    """`room`: spans that wait; one more is dropped. Seconds: `export`, that the collector gets to take some hundred; `last`, that
    a stopping daemon spends on those that are left."""

    room: int = 4096
    export: int = 5
    last: float = 2.0
