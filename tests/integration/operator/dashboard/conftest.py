"""`virtshim dashboard` as a program, for a scripted node, and a real browser."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.dashboard_node import DashboardNode

from virtshim.dashboard.pages import assets_directory
from virtshim.model.errors import Unavailable

LIMIT = 60_000


@dataclass(frozen=True, slots=True)
class Dashboard:
    login: str
    process: subprocess.Popen[str]

    @property
    def address(self) -> str:
        """The address with its path, without the token."""
        return self.login.partition("login")[0]

    @property
    def origin(self) -> str:
        return re.match(r"http://[^/]+", self.login)[0]  # type: ignore[index]


@pytest.fixture
def dashboard_of() -> Iterator[Callable[[str], Dashboard]]:
    started: list[subprocess.Popen[str]] = []
    try:
        assets_directory()
    except Unavailable:
        pytest.skip("AREA operator NOT TESTED: needs build/dashboard; run make dashboard-assets")

    def start(socket: str) -> Dashboard:
        process = subprocess.Popen(
            [sys.executable, "-m", "virtshim", "dashboard", "--socket", socket, "--port", "0"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env={**os.environ},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        return Dashboard(process.stdout.readline().split()[-1], process)

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, -signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DashboardNode]:
    with DashboardNode(str(tmp_path / "node.sock")) as one:
        yield one


@pytest.fixture
def dashboard(node: DashboardNode, dashboard_of: Callable[[str], Dashboard]) -> Dashboard:
    return dashboard_of(node.socket)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for one module only: while Playwright runs, this thread has a running event loop, and other tests have
    their own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser: Any, dashboard: Dashboard) -> Iterator[Any]:
    """A logged-in page. Errors of the page fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, locale="en-GB")
    context.set_default_timeout(LIMIT)
    one = context.new_page()
    wrong: list[str] = []
    one.on("pageerror", lambda error: wrong.append(str(error)))
    one.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    one.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    one.goto(dashboard.login)
    one.wait_for_selector('#pill[data-kind="fine"]')
    yield one
    context.close()
    assert wrong == []
