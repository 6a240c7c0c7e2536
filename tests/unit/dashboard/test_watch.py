"""Open pages stay up to date if the node's answers come late, or fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from virtshim.dashboard import watch
from virtshim.dashboard.node_calls import Pod, Seen
from virtshim.dashboard.readings import Reading
from virtshim.model.errors import Unavailable

POD = Pod(
    "a1", "default", "web", ready=True, created=1.0, handler="virtshim", has_screen=False, is_of_run=False, vms=()
)


class SlowToAnswer:
    """Of its one pod it tells all at the third time only."""

    def __init__(self) -> None:
        self.looks = 0
        self.asked = 0

    def look(self) -> Seen:
        self.looks += 1
        sizes = {"memory_given": 1 << 30, "vcpus": 2} if self.looks > 2 else {"memory_given": 0, "vcpus": 0}
        reading = Reading(cpu=None, memory=None, read=None, written=None, received=None, sent=None, **sizes)
        return Seen(time.time(), "virtshim 1", {}, {}, [POD], {POD.id: reading})

    def addresses(self, _pod: str) -> list[str]:
        self.asked += 1
        if self.asked < 3:
            raise Unavailable("deadline exceeded")
        return ["10.88.0.2"]

    def follow(self, tell: object, started: object) -> None: ...

    def follow_actions(self, tell: object) -> None: ...


async def told_until(node: SlowToAnswer, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    watching = watch.NodeWatch(node, dict, lambda **_: 0.0, gather=0.0)
    with watching.listening() as page:
        looking = asyncio.ensure_future(watching.run())
        try:
            async with asyncio.timeout(60):
                while not any(map(wanted, (await page.get()).get("pods", ()))):
                    pass
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


def test_an_unanswered_request_for_an_address_is_repeated_and_the_page_gets_the_address() -> None:
    node = SlowToAnswer()
    asyncio.run(told_until(node, lambda pod: pod["addresses"] == ["10.88.0.2"]))
    assert node.asked == 3


def test_vm_sizes_that_arrive_later_than_the_pod_reach_an_open_page() -> None:
    asyncio.run(told_until(SlowToAnswer(), lambda pod: (pod["vcpus"], pod["memoryGiven"]) == (2, 1 << 30)))


def test_a_failed_look_is_repeated_soon_and_a_slow_one_within_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert watch.pause_after(connected=False, watched=True, busy=10.0) == 1.0
    assert watch.pause_after(connected=True, watched=True, busy=0.01) == 2.0
    assert watch.pause_after(connected=True, watched=False, busy=0.01) == 10.0
    assert watch.pause_after(connected=True, watched=True, busy=0.5) == 10.0
    assert watch.pause_after(connected=True, watched=True, busy=10.0) == 30.0
