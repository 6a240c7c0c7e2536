"""Batches: every item once, in order, none too big."""

import pytest

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.batches import batches


def item(size: int) -> pb.PodSandbox:
    """A message of exactly `size` bytes."""
    made = pb.PodSandbox(id="x" * (size - 2))
    assert made.ByteSize() == size
    return made


@pytest.mark.parametrize(
    ("sizes", "batched"),
    [
        ([], []),
        ([10], [[10]]),
        ([50, 50], [[50, 50]]),
        ([50, 51], [[50], [51]]),
        ([40, 40, 40, 40, 40], [[40, 40], [40, 40], [40]]),
        ([10, 120, 10], [[10], [120], [10]]),
        ([120, 120], [[120], [120]]),
    ],
)
def test_a_batch_is_filled_up_to_its_size_and_a_bigger_item_goes_alone(
    sizes: list[int], batched: list[list[int]]
) -> None:
    items = [item(size) for size in sizes]
    made = list(batches(items, 100))
    assert [[one.ByteSize() for one in batch] for batch in made] == batched
    assert [one for batch in made for one in batch] == items


def test_items_are_taken_only_as_batches_are_wanted() -> None:
    taken = []

    def source():
        for n in range(10):
            taken.append(n)
            yield item(60)

    next(batches(source(), 100))
    assert taken == [0, 1]
