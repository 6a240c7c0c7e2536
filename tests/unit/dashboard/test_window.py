"""The amount of data on its way to a page is limited."""

from __future__ import annotations

import asyncio

from virtshim.dashboard.streams import Window


def test_reading_stops_while_the_page_falls_behind_and_continues_when_it_catches_up() -> None:
    async def scenario() -> list[bool]:
        window, open_after = Window(100), []
        for step in (
            lambda: window.sent(60),
            lambda: window.sent(60),
            lambda: window.shown(10),
            lambda: window.shown(11),
            lambda: window.shown(10**9),  # more than was sent
            lambda: window.sent(100),
        ):
            step()
            open_after.append(window.is_open)
        return open_after

    assert asyncio.run(scenario()) == [True, False, False, True, True, False]
