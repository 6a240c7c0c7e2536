"""Answers that are lists.

Made once: kubelet asks for all pods and containers every second. Records never change (a change is a new record), so what was
made of a record is right as long as that record is the one in the table.

In batches, for the Stream* calls: each message stays far below gRPC's limit, however many items a node has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from virtshim.model.ids import ContainerId, SandboxId


class _Record(Protocol):
    @property
    def id(self) -> SandboxId | ContainerId: ...


R = TypeVar("R", bound=_Record)
M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Message)

# Far below the 4 MiB that gRPC clients take if nobody told them more.
_BATCH_BYTES: Final = 1 << 20


class ItemCache(Generic[R, M]):
    """Used from any thread: at worst an item is made twice. The items are shared: never change them."""

    def __init__(self, make: Callable[[R], M], most: int = 10_000) -> None:
        """Items of records that are gone stay until a list of (nearly) everything renews them; no more than `most`."""
        self._make = make
        self._most = most
        self._made: dict[str, tuple[R, M]] = {}

    def items(self, records: Iterable[R]) -> list[M]:
        made = self._made
        wanted: dict[str, tuple[R, M]] = {}
        for record in records:
            found = made.get(record.id.value)
            if found is None or found[0] is not record:
                found = (record, self._make(record))
            wanted[record.id.value] = found
        if 2 * len(wanted) >= len(made) or len(made) > self._most:
            self._made = wanted
        else:
            made.update(wanted)
        return [item for _, item in wanted.values()]


class ResponseCache(Generic[R, A]):
    """The answer that holds all records; made anew when there is another record. Shared, as items are."""

    def __init__(self, make: Callable[[Sequence[R]], A]) -> None:
        self._make = make
        self._last: tuple[Sequence[R], A] | None = None

    def answer(self, records: Sequence[R]) -> A:
        last = self._last
        if last is None or len(last[0]) != len(records) or not all(map(operator.is_, last[0], records)):
            last = self._last = (records, self._make(records))
        return last[1]


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
