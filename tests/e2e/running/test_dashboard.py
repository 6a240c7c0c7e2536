"""`virtshim dashboard` serves a node with a real VM to requests as a browser sends them. ../test_dashboard.py tests the
page."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import aiohttp
import pytest
from node import VIRTSHIM
from running_vm import NAME, VCPUS, Vm
from terminal import LIMIT

pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.operator]

T = TypeVar("T")


@pytest.fixture
def login(vm: Vm) -> Iterator[SplitResult]:
    """The login address that the dashboard prints."""
    command = [*VIRTSHIM, "dashboard", "--socket", vm.node.socket, "--port", "0"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield urlsplit(process.stdout.readline().split()[-1])
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0


class Browser:
    """Sends the headers that a browser sends. Browsers resolve names below `localhost` themselves."""

    def __init__(self, session: aiohttp.ClientSession, login: SplitResult) -> None:
        self._session = session
        self._path = login.path.removesuffix("login")
        self._at = f"http://127.0.0.1:{login.port}"
        self._headers = {"Host": login.netloc, "Origin": f"http://{login.netloc}"}
        self._login = f"{self._at}{login.path}?{login.query}"

    async def log_in(self) -> int:
        """Logs in; returns the HTTP status."""
        async with self._session.get(self._login, headers=self._headers, allow_redirects=False) as answer:
            if cookie := answer.headers.get("Set-Cookie"):
                self._headers["Cookie"] = cookie.partition(";")[0]
            return answer.status

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self._at + self._path + path, headers=self._headers) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else await answer.text()

    async def act(self, path: str) -> tuple[int, Any]:
        async with self._session.post(self._at + self._path + path, headers=self._headers) as answer:
            return answer.status, await answer.json()

    async def picture(self, path: str) -> bytes:
        async with self._session.get(self._at + self._path + path, headers=self._headers) as answer:
            assert (answer.status, answer.content_type) == (200, "image/png"), await answer.text()
            return await answer.read()

    @asynccontextmanager
    async def open(self, path: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        async with self._session.ws_connect(self._at + self._path + path, headers=self._headers) as socket:
            yield socket


def as_a_browser(login: SplitResult, do: Callable[[Browser], Awaitable[T]]) -> T:
    async def run() -> T:
        async with asyncio.timeout(LIMIT), aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            return await do(Browser(session, login))

    return asyncio.run(run())


def test_the_dashboard_shows_the_running_vm(vm: Vm, login: SplitResult) -> None:
    async def look(browser: Browser) -> tuple[Any, Any]:
        assert await browser.log_in() == 303
        async with browser.open("live") as live:
            pods: list[dict[str, Any]] = []
            # Addresses and sizes may arrive later than the pod.
            while not pods or not pods[0]["addresses"] or not pods[0]["vcpus"]:
                pods = (await live.receive_json()).get("pods", pods)
        status, detail = await browser.get(f"pods/{vm.pod}")
        assert status == 200, detail
        return pods, detail

    (pod,), detail = as_a_browser(login, look)
    assert (pod["id"], pod["name"], pod["vcpus"]) == (vm.pod, NAME, VCPUS)
    assert vm.address in pod["addresses"]
    assert [one["id"] for one in detail["vms"]] == [vm.container]


def test_the_dashboard_shows_console_and_screen(vm: Vm, login: SplitResult) -> None:
    async def use(browser: Browser) -> bytes:
        await browser.log_in()
        async with browser.open(f"vms/{vm.container}/console") as console:
            assert await console.receive_json() == {"type": "attached", "input": True, "earlier": True}
            seen = b""
            await console.send_bytes(b"echo ans''wered\n")
            while b"answered" not in seen:
                seen += await console.receive_bytes()
        async with browser.open(f"vms/{vm.container}/console") as console:
            await console.receive_json()
            assert b"answered" in await console.receive_bytes(), "another page shows the earlier output"
        async with browser.open(f"pods/{vm.pod}/screen") as screen:
            first = await screen.receive()
            assert first.type is aiohttp.WSMsgType.BINARY, f"closed with {first.data}: {first.extra}"
            return first.data

    assert as_a_browser(login, use).startswith(b"RFB 003.008\n")


def test_the_dashboard_pauses_and_resumes_the_vm_and_takes_its_picture(vm: Vm, login: SplitResult) -> None:
    async def seen(live: aiohttp.ClientWebSocketResponse, state: str) -> None:
        states: list[str] = []
        while states != [state]:
            pods = (await live.receive_json()).get("pods", ())
            states = [one["state"] for pod in pods for one in pod["vms"]] or states

    async def use(browser: Browser) -> bytes:
        await browser.log_in()
        async with browser.open("live") as live:
            await seen(live, "running")
            status, told = await browser.act(f"vms/{vm.container}/pause")
            assert (status, "paused until it is resumed" in told["message"]) == (200, True), told
            try:
                await seen(live, "paused")
                status, told = await browser.act(f"vms/{vm.container}/reset")
                assert (status, "virtshim resume" in told["error"]) == (409, True), told
            finally:
                status, told = await browser.act(f"vms/{vm.container}/resume")
                assert status == 200, told
            await seen(live, "running")
        return await browser.picture(f"vms/{vm.container}/screenshot")

    assert as_a_browser(login, use).startswith(b"\x89PNG")


def test_the_dashboard_needs_a_session_and_a_login_works_once(vm: Vm, login: SplitResult) -> None:
    async def try_all(browser: Browser) -> list[int]:
        before, _ = await browser.get(f"pods/{vm.pod}")
        return [before, await browser.log_in(), await browser.log_in()]

    assert as_a_browser(login, try_all) == [401, 303, 403]
