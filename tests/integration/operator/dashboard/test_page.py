"""In the browser, a person sees the node's VMs live and uses their consoles."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from fakes.dashboard_node import DashboardNode, startup_of
from podclient import wait_until

from virtshim.cri.operator_client import operating
from virtshim.guest.operation import Action

pytestmark = pytest.mark.operator

HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>"


class Impostor:
    """A program that takes the dashboard's port after its end: it accepts all requests of a page, and has a console."""

    def __init__(self, port: int) -> None:
        self.asked: list[str] = []
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        for address in ("127.0.0.1", "::1"):
            await web.TCPSite(self._runner, address, self._port, reuse_address=True).start()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if "upgrade" not in request.headers.get("Connection", "").lower():
            return web.Response(text="it is me")
        page = web.WebSocketResponse()
        await page.prepare(request)
        await page.send_json({"run": "guessed", "input": True})
        async for _ in page:
            pass
        return page


def on_the_terminal(text: str) -> str:
    """For `wait_for_function`: whether the terminal's buffer contains the text."""
    return f"""() => {{
      const terminal = document.querySelector(".terminal")?.terminal;
      if (!terminal) return false;
      const buffer = terminal.buffer.active;
      for (let line = 0; line < buffer.length; line++)
        if (buffer.getLine(line).translateToString(true).includes({text!r})) return true;
      return false;
    }}"""


def test_a_person_sees_the_nodes_vms_live(page: Any, node: DashboardNode) -> None:
    page.wait_for_selector("text=No VMs yet")
    page.wait_for_selector(".welcome:has-text('virtshim run -d --name web IMAGE')")
    assert page.locator(".tile").first.inner_text().split("\n") == ["VMs", "0", "no pods"]
    assert page.locator(".chart").first.is_hidden()
    made = node.add("postgres", "databases", ip="10.88.7.7", startup=startup_of(time.time() - 60))
    row = page.locator(".row", has_text="postgres")
    row.wait_for()
    page.wait_for_selector("text=VM vm of databases/postgres created")
    assert "10.88.7.7" in row.inner_text()
    page.wait_for_function("() => document.querySelector('.row .cpu').textContent.includes('%')")
    row.click()
    page.wait_for_selector("h1:has-text('postgres')")
    for title in ("CPU", "Memory", "Disk", "Network"):
        chart = page.locator(".pod .chart", has_text=title).first
        chart.locator(".line").first.wait_for(state="attached")
        page.wait_for_function(
            "(path) => path.getAttribute('d').split('L').length > 2", arg=chart.locator(".line").first.element_handle()
        )
    page.keyboard.press("2")
    page.wait_for_selector(".waterfall tr:has-text('cloud-init')")
    page.keyboard.press("5")
    page.wait_for_selector(f"dd:has-text('{made.status.id}')")
    node.end(made, 3, "it broke")
    page.keyboard.press("1")
    page.wait_for_selector(".badge[data-state=exited]")
    page.wait_for_selector("text=stopped with code 3 (Error): it broke")
    node.remove(made)
    page.wait_for_selector(".badge[data-state=gone]")
    page.wait_for_selector("text=No pods on this node.")


def test_a_person_chooses_the_time_that_graphs_show(page: Any, node: DashboardNode) -> None:
    node.add("web")
    page.locator(".row").click()
    page.wait_for_selector(".badge[data-state=running]")
    page.wait_for_selector(".grid:has-text('10 min')")
    has_value = "() => document.querySelector('.pod .chart .value').textContent.includes('%')"
    page.wait_for_function(has_value)  # longer spans are asked for again after a sample's time, which is 12 s
    for span, mark in (("3600", "60 min"), ("86400", "24 h"), ("600", "10 min")):
        page.locator(f"[data-span='{span}']").click()
        page.wait_for_selector(f".pod .chart:has-text('CPU') .grid:has-text('{mark}')")
        page.wait_for_function(has_value)
        assert page.locator(".chip[data-span][aria-pressed=true]").get_attribute("data-span") == span
    page.locator("[data-span='3600']").click()
    page.keyboard.press("n")
    page.wait_for_selector(".tiles")
    page.wait_for_selector(".chart:has-text('CPU') .grid:has-text('60 min')")


def test_a_paused_vm_has_its_own_badge_and_its_pause_is_among_its_pods_events(page: Any, node: DashboardNode) -> None:
    made = node.add("web")
    assert made.vm is not None
    page.locator(".row").click()
    page.wait_for_selector(".badge[data-state=running]")
    with operating(f"{os.path.dirname(node.socket)}/admin.sock") as operator:
        operator.act(Action.PAUSE, made.vm.id)
        page.wait_for_selector(".badge[data-state=paused]:text-is('paused')")
        page.wait_for_selector(".row .under:has-text('paused')")
        page.wait_for_selector(".trouble:has-text('virtshim resume continues it')")
        page.wait_for_selector(".pod .events:has-text('pause of default/web by an operator')")
        page.keyboard.press("3")
        page.wait_for_function(on_the_terminal("login:"))
        page.keyboard.press("Control+]")
        operator.act(Action.RESUME, made.vm.id)
    page.wait_for_selector(".badge[data-state=running]")
    page.keyboard.press("1")
    page.wait_for_selector(".pod .events:has-text('resume of default/web by an operator')")
    assert page.locator(".pod .events li", has_text="pause of default/web").count() == 1


def test_a_person_types_on_a_console(page: Any, node: DashboardNode) -> None:
    node.add("talker")
    page.locator(".row").click()
    page.wait_for_selector(".tab[aria-selected=true]")
    page.keyboard.press("3")
    page.wait_for_function(on_the_terminal("login:"))
    page.keyboard.type("hello\n")
    page.wait_for_function(on_the_terminal("typed"))
    assert bytes(node.typed) == b"hello\r"
    assert node.sizes[-1]["Width"] > 20
    # Keys are the guest's, not the page's, until the console is left.
    page.keyboard.type("?j")
    page.wait_for_function(on_the_terminal("?j"))
    page.keyboard.press("Control+]")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    # A connection that breaks comes back.
    node.greeting = b"again: "
    node.disconnect_streams()
    page.wait_for_function(on_the_terminal("again:"))
    page.keyboard.press("4")
    page.wait_for_selector("text=This VM has no screen")


def test_a_console_shows_its_earlier_output_and_answers_none_of_its_questions(
    page: Any, node: DashboardNode, tmp_path: Path
) -> None:
    log = tmp_path / "console.log"
    log.write_bytes(b"\0" * 9000 + b"cut off\r\nwhere is the cursor?\x1b[6n and who are you?\x1b[c\r\nbooted\r\n")
    node.add("talker", facts={"consoleLog": str(log)})
    page.locator(".row").click()
    page.wait_for_selector(".tab[aria-selected=true]")
    page.keyboard.press("3")
    page.wait_for_function(on_the_terminal("booted"))
    page.wait_for_function(on_the_terminal("login:"))
    assert not page.evaluate(on_the_terminal("cut off"))
    page.keyboard.type("x")
    wait_until(lambda: node.typed, 60, "the key arrives")
    assert bytes(node.typed) == b"x"
    node.greeting = b"again: "
    log.write_bytes(b"missed meanwhile\r\n")
    node.disconnect_streams()
    page.wait_for_function(on_the_terminal("again:"))
    assert page.evaluate(on_the_terminal("missed meanwhile"))


def test_a_console_without_input_says_so(page: Any, node: DashboardNode) -> None:
    node.takes_input = False
    node.add("silent")
    page.locator(".row").click()
    page.wait_for_selector(".tab[aria-selected=true]")
    page.keyboard.press("3")
    page.wait_for_selector("text=to look only")
    page.keyboard.type("x\n")
    page.keyboard.press("Control+]")
    assert node.typed == b""


def test_a_console_that_floods_leaves_page_and_server_alive(page: Any, node: DashboardNode) -> None:
    node.flood = lambda: itertools.repeat(b"y" * 65532 + b"\r\n")
    node.add("flood")
    page.locator(".row").click()
    page.wait_for_selector(".tab[aria-selected=true]")
    page.keyboard.press("3")
    page.wait_for_function(on_the_terminal("yyy"))
    page.keyboard.press("Control+]")
    page.keyboard.press("n")
    page.wait_for_selector("h2:has-text('Events')")
    wait_until(lambda: node.consoles() == 0, 60, "nobody reads the flood any more")
    node.flood = lambda: iter((*(b"y" * 1022 + b"\r\n" for _ in range(2000)), b"THE END\r\n"))
    page.locator(".row").click()
    page.wait_for_selector(".tab[aria-selected=true]")
    page.keyboard.press("3")
    page.wait_for_function(on_the_terminal("THE END"))


def test_text_from_pods_is_shown_as_text(page: Any, node: DashboardNode) -> None:
    node.greeting = f"\x1b]0;{HOSTILE}\x07{HOSTILE}\r\nloaded".encode()
    node.conditions["NetworkReady"] = HOSTILE
    node.facts["brokenDevices"] = {HOSTILE: HOSTILE}
    made = node.add(
        f"{HOSTILE}\u202egnp", HOSTILE, vm=HOSTILE, image=HOSTILE, ip=HOSTILE, message=HOSTILE,
        labels={HOSTILE: HOSTILE}, annotations={HOSTILE: HOSTILE}, facts={HOSTILE: {HOSTILE: [HOSTILE]}},
        startup=[{"name": HOSTILE, "began": time.time() - 9, "seconds": 1, "error": HOSTILE}],
    )  # fmt: skip
    page.wait_for_selector("#banner:has-text('onerror')")
    page.wait_for_selector(".row .name:has-text('<img')")
    page.locator(".row").click()
    for key, seen in (("1", ".events"), ("2", ".waterfall"), ("5", ".facts.wide"), ("3", ".terminal")):
        page.keyboard.press(key)
        page.locator(seen).first.wait_for()
        assert page.locator("main img, main script, #banner img").count() == 0
    page.wait_for_function(on_the_terminal("loaded"))
    page.keyboard.press("Control+]")
    node.end(made, 1, HOSTILE)
    page.keyboard.press("1")
    page.wait_for_selector(".events:has-text('stopped with code 1')")
    assert page.locator("main img, main script").count() == 0
    assert "\u202e" not in page.locator("body").inner_text()


def test_the_page_survives_a_restart_of_the_node(page: Any, node: DashboardNode) -> None:
    node.add("lasting")
    page.locator(".row").wait_for()
    node.stop()
    page.wait_for_selector("#pill:has-text('reconnecting')")
    assert page.locator(".row").count() == 1, "what was known is still shown"
    node.start()
    page.wait_for_selector("#pill[data-kind=fine]")
    page.wait_for_selector("text=the node answers again")
    node.add("later")
    page.locator(".row", has_text="later").wait_for()


@pytest.mark.full
def test_many_pods_render_few_rows_and_keys_reach_all_of_them(page: Any, node: DashboardNode) -> None:
    for number in range(300):
        node.add(f"pod-{number:03}")
    page.wait_for_selector(".chip:has-text('All') .count:text-is('300')")
    page.locator(".row").first.wait_for()
    assert page.locator(".row").count() < 60
    page.keyboard.press("/")
    page.keyboard.press("ArrowDown")
    page.wait_for_function(
        "() => document.activeElement.matches('.row') && document.activeElement.textContent.includes('pod-000')"
    )
    page.keyboard.press("End")
    page.wait_for_function(
        "() => document.activeElement.matches('.row') && document.activeElement.textContent.includes('pod-299')"
    )
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('pod-299')")
    page.keyboard.press("k")
    page.wait_for_selector("h1:has-text('pod-298')")
    page.keyboard.press("/")
    page.keyboard.type("pod-123")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('pod-123')")


@pytest.mark.parametrize("width", [360, pytest.param(768, marks=pytest.mark.full)])
def test_nothing_is_wider_than_a_narrow_screen(page: Any, node: DashboardNode, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 720})
    node.add("a-name-as-long-as-kubernetes-lets-it-be-" * 5, image="registry.example/" + "x" * 200, startup=startup_of(9.0),
             labels={"l" * 60: "v" * 60})  # fmt: skip
    page.locator(".row").click()
    for key, seen in (("1", ".chart"), ("2", ".waterfall"), ("3", ".terminal"), ("5", ".facts.wide")):
        page.keyboard.press(key)
        page.locator(seen).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, seen
        if key == "3":
            page.wait_for_function(on_the_terminal("login:"))
            page.keyboard.press("Control+]")
    page.locator(".back").click() if width < 860 else None
    page.wait_for_selector(".tiles")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_phone_has_a_console_of_full_width_and_the_keys_that_its_keyboard_lacks(
    page: Any, node: DashboardNode
) -> None:
    node.add("talker")
    page.locator(".row").click()
    page.wait_for_selector(".tab[aria-selected=true]")
    page.keyboard.press("3")
    page.wait_for_function(on_the_terminal("login:"))
    keys = page.locator(".keybar button")
    assert keys.first.is_hidden(), "a wide screen has a keyboard"
    page.set_viewport_size({"width": 390, "height": 780})
    keys.first.wait_for()
    assert keys.all_inner_texts() == ["Esc", "Tab", "Ctrl", "←", "↑", "↓", "→"]
    assert page.locator(".stagebox").bounding_box()["width"] == 390
    for key in ("Esc", "Tab", "↑", "Ctrl"):
        keys.filter(has_text=key).click()
    assert keys.filter(has_text="Ctrl").get_attribute("aria-pressed") == "true"
    page.keyboard.type("cc")
    for key in ("Ctrl", "←"):
        keys.filter(has_text=key).click()
    expected = b"\x1b\t\x1b[A\x03c\x1b[1;5D"
    wait_until(lambda: len(node.typed) == len(expected), 60, "all keys have arrived")
    assert bytes(node.typed) == expected
    assert keys.filter(has_text="Ctrl").get_attribute("aria-pressed") == "false"


def test_the_page_says_that_the_dashboard_has_ended_and_does_not_connect_again(
    page: Any, node: DashboardNode, dashboard: Any
) -> None:
    node.add("talker")
    page.clock.install()
    page.reload()
    page.locator(".row").click()
    page.wait_for_selector(".tab[aria-selected=true]")
    page.keyboard.press("3")
    page.wait_for_function(on_the_terminal("login:"))
    tried: list[str] = []
    page.on("websocket", lambda one: tried.append(one.url))
    dashboard.process.send_signal(signal.SIGTERM)
    page.wait_for_selector("#banner:has-text('The dashboard has ended. Start `virtshim dashboard`')")
    page.wait_for_selector(".says:has-text('Not connected any more')")
    assert dashboard.process.wait(60) == 0
    page.clock.run_for(60_000)
    assert page.locator("#pill").inner_text() == "ended"
    assert tried == []


def test_the_page_gives_up_on_a_dashboard_that_was_killed(page: Any, dashboard: Any) -> None:
    page.clock.install()
    page.reload()
    page.wait_for_selector("#pill[data-kind=fine]")
    dashboard.process.kill()
    page.wait_for_selector("#pill:has-text('reconnecting')")

    def given_up() -> bool:
        page.clock.run_for(5000)
        return bool(page.locator("#pill").inner_text() == "ended")

    wait_until(given_up, 60, "the page gives up")
    page.wait_for_selector("#banner:has-text('the way to it is broken')")


@pytest.mark.full
def test_colours_follow_the_system_or_the_switch(page: Any, node: DashboardNode) -> None:
    def background() -> str:
        found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return found

    page.emulate_media(color_scheme="light")
    light = background()
    page.emulate_media(color_scheme="dark")
    dark = background()
    assert light != dark
    page.keyboard.press("t")
    assert background() == light
    page.reload()
    page.wait_for_selector("#pill[data-kind=fine]")
    assert background() == light, "the choice is kept with the tab"
    page.locator("#theme").click()
    assert background() == dark


def test_a_program_that_takes_over_the_port_gets_no_typed_input(page: Any, node: DashboardNode, dashboard: Any) -> None:
    node.add("talker")
    page.locator(".row").click()
    page.wait_for_selector(".tab[aria-selected=true]")
    page.keyboard.press("3")
    page.wait_for_function(on_the_terminal("login:"))
    port = urlsplit(dashboard.origin).port
    dashboard.process.kill()
    dashboard.process.wait()
    with Impostor(port) as impostor:
        page.wait_for_selector("#banner:has-text('another program answers')")
        page.keyboard.type("secret\n")
        assert {path.rpartition("/")[2] for path in impostor.asked} <= {"live", ""}, "no console, and no script"
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


@pytest.mark.full
def test_every_control_is_reached_by_tab_and_shows_its_focus(page: Any, node: DashboardNode) -> None:
    node.add("one")
    page.locator(".row").wait_for()
    met = []
    for _ in range(14):
        page.keyboard.press("Tab")
        met.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or met[-1] in ("view", "BODY"), met
    assert {"brand", "theme", "help", "search", "chip", "row", "frame"} <= {re.split(r"\s", name)[0] for name in met}
