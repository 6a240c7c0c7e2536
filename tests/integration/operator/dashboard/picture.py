"""Makes docs/dashboard.png: the page for an invented node with ten minutes of history. `make dashboard-picture`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fakes.dashboard_node import DashboardNode, startup_of
from playwright.sync_api import sync_playwright

from virtshim.dashboard import command
from virtshim.dashboard.readings import NODE, Graphs, Sample, total

_PODS = [
    ("build-runner", "ci", 0.9, 3072), ("debian", "default", 0.08, 640), ("fedora-coreos", "default", 0.0, 0),
    ("k6-load", "ci", 1.7, 1500),
    ("postgres-0", "databases", 0.55, 2900), ("postgres-1", "databases", 0.35, 2700), ("router", "network", 0.22, 380),
    ("web-7d4b9c6f5d-2xkqp", "shop", 0.4, 900), ("web-7d4b9c6f5d-9zv4t", "shop", 0.45, 920),
    ("windows-2022", "legacy", 0.3, 3600),
]  # fmt: skip
_HOST = {
    "hostname": "node-1", "system": "Debian GNU/Linux 12 (bookworm)", "kernel": "6.1.0-28-amd64", "cpus": 8,
    "cpuModel": "AMD EPYC 7313P", "memoryTotal": 32 << 30, "memoryAvailable": 13 << 30, "swapTotal": 0, "load": [3.4, 3.1, 2.8],
    "uptime": 12 * 86400, "kvm": True,
}  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, DashboardNode(f"{directory}/node.sock") as node:
        for name, namespace, load, memory in _PODS:
            ended = not load
            pod = node.add(name, namespace, state="EXITED" if ended else "RUNNING", created=5000,
                           image="debian-12-generic-amd64.qcow2", startup=startup_of(time.time() - 5000))  # fmt: skip
            pod.load, pod.memory = load, memory << 20
        with served(node) as one:
            taken(one, Path(sys.argv[1]))


@contextlib.contextmanager
def served(node: DashboardNode) -> Iterator[command.Served]:
    command.host_facts = lambda: _HOST  # type: ignore[attr-defined]
    ready: Any = threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        over = asyncio.Event()
        async with command.serving(node.socket, 0, lived(node)) as one:
            found.extend([one, asyncio.get_running_loop(), over])
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    found[1].call_soon_threadsafe(found[2].set)
    thread.join(60)


def lived(node: DashboardNode) -> Graphs:
    """Ten minutes of samples, the same at each run except for their time."""
    graphs, chance, now = Graphs(), random.Random(7), time.time()
    for step in range(298):
        samples = {}
        for number, (pod, (_, _, load, memory)) in enumerate(zip(node.pods, _PODS, strict=True)):
            if load:
                wave = 1 + 0.35 * math.sin(step / (9 + number)) * math.sin(step / 31 + number) + 0.12 * chance.random()
                samples[pod] = Sample(now - 600 + 2 * step, load * wave, (memory << 20) * (0.97 + wave / 40), 9.5e5 * wave,
                                      3.4e5 * wave * wave, 4.4e4 * wave, 2e4 * wave)  # fmt: skip
        graphs.add({**samples, NODE: total(now - 600 + 2 * step, samples)})
    return graphs


def taken(one: command.Served, picture: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1320, "height": 800}, color_scheme="dark", locale="en-GB")
        page.goto(one.login_url())
        page.locator(".row", has_text="postgres-0").click()
        page.wait_for_selector("h1:has-text('postgres-0')")
        # A reading after the page has loaded has current numbers.
        page.wait_for_function("() => document.querySelectorAll('.pod .chart .value').length === 4")
        page.wait_for_function(
            "() => ![...document.querySelectorAll('.pod .chart .value')].some((one) => one.textContent.includes('\\u2013'))"
        )
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=str(picture))
        browser.close()


if __name__ == "__main__":
    main()
