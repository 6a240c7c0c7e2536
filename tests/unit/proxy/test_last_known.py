"""The last known lists of runtimes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.proxy.last_known import LastKnown
from virtshim.proxy.wire import LIST_PODS

PODS = pb.ListPodSandboxResponse(items=[pb.PodSandbox(id="one")]).SerializeToString()


def test_a_list_that_no_thread_can_save_is_known_all_the_same(tmp_path: Path) -> None:
    async def kept() -> LastKnown:
        known = LastKnown(str(tmp_path), ["vms"])
        no_threads = ThreadPoolExecutor()
        no_threads.shutdown()
        asyncio.get_running_loop().set_default_executor(no_threads)
        known.keep("vms", LIST_PODS, PODS, known.asking())
        await known.saved()
        return known

    known = asyncio.run(kept())
    assert known.answer("vms", LIST_PODS, b"") == PODS
    assert list(tmp_path.iterdir()) == []


def test_a_list_that_could_not_be_saved_is_saved_with_the_next_answer(tmp_path: Path) -> None:
    async def kept() -> None:
        directory = tmp_path / "known"
        directory.mkdir()
        known = LastKnown(str(directory), ["vms"])
        directory.rmdir()
        known.keep("vms", LIST_PODS, PODS, known.asking())
        await known.saved()
        directory.mkdir()
        known.keep("vms", LIST_PODS, PODS, known.asking())
        await known.saved()
        assert LastKnown(str(directory), ["vms"]).answer("vms", LIST_PODS, b"") == PODS

    asyncio.run(kept())
