"""Lists in batches, for the Stream* calls: each message stays far below gRPC's limit, however many items a node has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

# Far below the 4 MiB that gRPC clients take if nobody told them more.
_BATCH_BYTES: Final = 1 << 20


def batches(items: Iterable[M], size: int = _BATCH_BYTES) -> Iterator[list[M]]:
    """Each item once, in order; a batch holds items of up to `size` bytes together, or one that is bigger. Nothing for no
    items: an empty list is a stream that ends at once."""
    batch: list[M] = []
    filled = 0
    for item in items:
        room = item.ByteSize()
        if batch and filled + room > size:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += room
    if batch:
        yield batch
