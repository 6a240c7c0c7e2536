"""A page of the dashboard is right even if the node changes during the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.dashboard.login import Sessions
from virtshim.dashboard.pages import Pages, Place
from virtshim.dashboard.streams import ENDED, close
from virtshim.model.errors import NotFound


class Node:
    """`vms`: those that are still there."""

    def __init__(self, vms: Sequence[str]) -> None:
        self._vms = vms

    def pod_status(self, pod: str) -> pb.PodSandboxStatusResponse:
        return pb.PodSandboxStatusResponse(status=pb.PodSandboxStatus(id=pod))

    def vm_status(self, vm: str) -> pb.ContainerStatusResponse:
        if vm not in self._vms:
            raise NotFound(f"no such container: {vm}")
        return pb.ContainerStatusResponse(status=pb.ContainerStatus(id=vm))

    def start_up(self, _pod: str) -> Sequence[object]:
        return ()


def test_a_pods_page_leaves_out_a_vm_that_has_gone_since_the_last_look() -> None:
    watch = Mock(vms_of=lambda _pod: ["new", "old"])
    place = Place.of_this_run()
    pages = Pages(Node(["new"]), watch, Sessions(), Path(), place)  # type: ignore[arg-type]

    async def answered() -> web.StreamResponse:
        path = f"{place.path}/pods/web"
        found = await pages.application().router.resolve(make_mocked_request("GET", path))
        return await found.handler(make_mocked_request("GET", path, match_info=dict(found)))

    answer = asyncio.run(answered())
    assert answer.status == 200
    assert [vm["id"] for vm in json.loads(answer.text)["vms"]] == ["new"]  # type: ignore[attr-defined]


class Page:
    """Keeps how it was closed."""

    async def close(self, *, code: int, message: bytes) -> None:
        self.code, self.message = code, message


@pytest.mark.parametrize(
    "why",
    ["", "ended", "x" * 500, "\u00e4" * 61 + "x", "a" + "\u00e4" * 200, "\ud800" + "\u20ac" * 99],
    ids=["none", "short", "long", "as long as can be", "cut in a letter", "no text of UTF-8"],
)
def test_the_reason_for_a_streams_end_fits_into_a_close_frame(why: str) -> None:
    page = Page()
    asyncio.run(close(page, ENDED, why))  # type: ignore[arg-type]
    assert len(page.message) <= 123
    told = page.message.decode()  # a browser takes nothing else
    assert why.encode(errors="replace").decode().startswith(told)
    assert bool(told) == bool(why)
