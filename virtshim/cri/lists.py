"""Caches and batches for answers that are lists.

The caches exist because kubelet lists all pods and containers every second. Records are immutable, so a message made from a
record is right as long as the table holds the same record, and a list of all as long as the table does not change.

The batches are for the Stream* calls: each message stays far below gRPC's limit, however many items a node has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar, cast

from google.protobuf.message import Message

from virtshim.model.container import Container
from virtshim.model.sandbox import Sandbox

R = TypeVar("R", bound=Sandbox | Container)
M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Message)

# Far below gRPC clients' default limit of 4 MiB.
_BATCH_BYTES: Final = 1 << 20


class ItemCache(Generic[R, M]):
    """Safe to use from any thread; at worst an item is made twice. Callers share the items and must not change them."""

    def __init__(self, make: Callable[[R], M], most: int = 10_000) -> None:
        """Items of removed records stay until a list of at least half of the cached items replaces the cache, or until it has
        more than `most` items."""
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


class ResponseCache(Generic[A]):
    """The answer with all records of a table, encoded. It is made again if the table has changed. `generation`: the table's."""

    def __init__(self, generation: Callable[[], int], make: Callable[[], A]) -> None:
        self._generation = generation
        self._make = make
        self._last: tuple[int, bytes] | None = None

    def answer(self) -> A:
        """Bytes, which `encoded` passes on. gRPC's types only know messages as answers."""
        now, last = self._generation(), self._last
        if last is None or last[0] != now:
            last = self._last = (now, self._make().SerializeToString())
        return cast("A", last[1])


def encoded(answer: Message | bytes) -> bytes:
    """gRPC's serializer of answers, which may be encoded already."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def batches(items: Iterable[M], size: int = _BATCH_BYTES) -> Iterator[list[M]]:
    """Splits the items into batches, in order. A batch has up to `size` bytes, or a single larger item. Without items there is no
    batch, so an empty list is a stream that ends at once."""
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
