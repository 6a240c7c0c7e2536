"""A list item is made once for each record and not kept for ever. Batches have each item once, in order, and none is
too big."""

import dataclasses

import pytest

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.lists import ItemCache, ResponseCache, batches, encoded
from virtshim.model.ids import SandboxId
from virtshim.model.sandbox import PodKey, Sandbox, SandboxConfig

PODS = [
    Sandbox(SandboxId(f"{n:064x}"), PodKey("default", f"pod-{n}", "u", 0), SandboxConfig(), created_at=n)
    for n in range(10)
]


class Maker:
    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, pod: Sandbox) -> pb.PodSandbox:
        self.made.append(pod.key.name)
        return pb.PodSandbox(id=pod.id.value, runtime_handler=pod.config.runtime_handler)


@pytest.fixture
def make() -> Maker:
    return Maker()


@pytest.fixture
def items(make: Maker) -> ItemCache[Sandbox, pb.PodSandbox]:
    return ItemCache(make)


def test_an_item_is_made_once(items, make):
    first = items.items(PODS)
    assert items.items(PODS) == first
    assert [item.id for item in first] == [pod.id.value for pod in PODS]
    assert len(make.made) == 10


def test_a_changed_record_has_a_new_item(items, make):
    items.items(PODS)
    changed = dataclasses.replace(PODS[3], config=SandboxConfig(runtime_handler="vm"))
    answer = items.items([*PODS[:3], changed, *PODS[4:]])
    assert [item.runtime_handler for item in answer] == ["", "", "", "vm", "", "", "", "", "", ""]
    assert make.made[10:] == ["pod-3"]


def test_a_filtered_list_uses_cached_items_and_evicts_none(items, make):
    items.items(PODS)
    assert len(items.items(PODS[:2])) == 2
    items.items(PODS)
    assert len(make.made) == 10


def test_items_of_removed_records_are_evicted(items, make):
    items.items(PODS)
    items.items(PODS[:6])
    make.made.clear()
    items.items(PODS)
    assert make.made == ["pod-6", "pod-7", "pod-8", "pod-9"]


def test_filtered_lists_do_not_grow_the_cache_without_limit(make):
    items = ItemCache(make, most=4)
    for pod in PODS:
        items.items([pod])
    make.made.clear()
    for pod in PODS[:5]:
        items.items([pod])
    assert make.made == ["pod-0", "pod-1", "pod-2", "pod-3", "pod-4"]


def test_a_whole_answer_is_encoded_only_when_a_record_has_changed() -> None:
    generation, pods = 0, PODS
    answers = ResponseCache(
        lambda: generation, lambda: pb.ListPodSandboxResponse(items=[pb.PodSandbox(id=pod.id.value) for pod in pods])
    )
    first = encoded(answers.answer())
    assert encoded(answers.answer()) is first
    for others in (PODS[1:], [*PODS, PODS[0]], []):
        generation, pods = generation + 1, others
        answer = pb.ListPodSandboxResponse.FromString(encoded(answers.answer()))
        assert [item.id for item in answer.items] == [pod.id.value for pod in others]


def test_an_answer_that_was_made_while_a_record_changed_is_made_again() -> None:
    generation = 0

    def change_meanwhile() -> pb.ListPodSandboxResponse:
        nonlocal generation
        generation += generation < 3
        return pb.ListPodSandboxResponse(items=[pb.PodSandbox(id=str(generation))])

    answers = ResponseCache(lambda: generation, change_meanwhile)
    told = [pb.ListPodSandboxResponse.FromString(encoded(answers.answer())).items[0].id for _ in range(5)]
    assert told == ["1", "2", "3", "3", "3"]


def test_a_message_is_encoded_as_grpc_would_do_it() -> None:
    assert encoded(pb.PodSandbox(id="x")) == pb.PodSandbox(id="x").SerializeToString()


# --- batches


def sized(size: int) -> pb.PodSandbox:
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
def test_a_batch_is_filled_up_to_its_size_and_a_bigger_item_is_sent_alone(
    sizes: list[int], batched: list[list[int]]
) -> None:
    items = [sized(size) for size in sizes]
    made = list(batches(items, 100))
    assert [[one.ByteSize() for one in batch] for batch in made] == batched
    assert [one for batch in made for one in batch] == items


def test_items_are_made_only_as_batches_are_consumed() -> None:
    taken = []

    def source():
        for n in range(10):
            taken.append(n)
            yield sized(60)

    next(batches(source(), 100))
    assert taken == [0, 1]
