"""How far a console has been written to its log, as kept across restarts. No I/O.

Every raw byte before `offset` is in the log's first `log_size` bytes (or was lost, being one of too many), and nothing else
is. What is behind `log_size` in the same file was written by a process that died before it could say so, and is written
again.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

# One fixed length: the record is overwritten in place, by one write that a kill cannot cut in two.
ENCODED_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Position:
    """`raw_inode` 0: the console has not said anything yet."""

    offset: int = 0
    raw_inode: int = 0
    log_device: int = 0
    log_inode: int = 0
    log_size: int = 0


def encode(position: Position) -> bytes:
    text = json.dumps(dataclasses.asdict(position), separators=(",", ":"))
    return text.ljust(ENCODED_BYTES - 1).encode() + b"\n"


def decode(record: bytes) -> Position | None:
    """None for anything that `encode` did not make."""
    try:
        fields = json.loads(record)
        position = Position(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    values = dataclasses.astuple(position)
    return position if all(type(value) is int and value >= 0 for value in values) else None
