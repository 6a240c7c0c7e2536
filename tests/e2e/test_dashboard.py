"""The dashboard works in a browser, for a node with a real VM."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from guest import BOOT, READY
from node import VIRTSHIM, Node
from podclient import PodClient, container_config, pod_config, wait_for_log

# `make test` has the page in a browser before a made-up node: tests/integration/operator/dashboard.
pytestmark = [pytest.mark.e2e, pytest.mark.guest, pytest.mark.operator, pytest.mark.full]

LIMIT = 90_000
ON_THE_TERMINAL = """(text) => {
  const buffer = document.querySelector(".terminal")?.terminal?.buffer.active;
  if (!buffer) return false;
  const lines = Array.from({length: buffer.length}, (_, line) => buffer.getLine(line).translateToString(true));
  return lines.some((line) => line.includes(text));
}"""


@pytest.fixture
def page(node: Node) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    command = [*VIRTSHIM, "dashboard", "--socket", node.socket, "--port", "0"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        login = process.stdout.readline().split()[-1]
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
                one = browser.new_page(viewport={"width": 1280, "height": 800})
                one.set_default_timeout(LIMIT)
                one.goto(login)
                yield one
                browser.close()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def test_the_dashboard_shows_a_vm_booting_and_reaches_its_console_and_screen(
    page: Any, cri: PodClient, node: Node, image_url: str
) -> None:
    config = pod_config("seen", f"{node.directory}/logs/dashboard", annotations={"virtshim.io/vnc": "true"})
    wanted = container_config(cri.pull(f"{image_url}/guest.qcow2"))
    wanted.stdin = True
    pod = cri.run_pod(config)
    vm = cri.create(pod, wanted, config)
    cri.start(vm)
    page.locator(".row", has_text="seen").click()
    page.wait_for_selector(".badge[data-state=running]")

    # Its start, phase by phase.
    page.keyboard.press("2")
    for phase in ("network", "disk", "libvirt", "firmware"):
        page.locator(f'.waterfall tr[data-phase="{phase}"]').wait_for()
    page.wait_for_function(
        "() => /^[0-9.]+ m?s$/.test(document.querySelector('tr[data-phase=network] .ms').textContent)"
    )

    # Its console answers to typed input.
    wait_for_log(cri.status(vm).log_path, READY, BOOT)
    page.keyboard.press("3")
    page.wait_for_selector("text=Ctrl-] leaves the console")
    for _ in range(30):  # a starting shell discards input before its prompt
        page.keyboard.type("echo ans''wered\n")
        try:
            page.wait_for_function(ON_THE_TERMINAL, arg="answered", timeout=3000)
            break
        except Exception:  # noqa: BLE001  Playwright's own, which is imported where it is used
            continue
    assert page.evaluate(ON_THE_TERMINAL, "answered")
    page.keyboard.press("Control+]")

    # Its screen has pixels of more than one colour.
    page.keyboard.press("4")
    page.wait_for_selector(".display[data-connected] canvas")
    page.wait_for_function(
        """() => {
          const canvas = document.querySelector(".display canvas");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const colours = new Set();
          for (let at = 0; at < data.length; at += 4) colours.add(data[at] * 65536 + data[at + 1] * 256 + data[at + 2]);
          return canvas.width >= 320 && colours.size > 1;
        }"""
    )

    # Its graphs move.
    page.keyboard.press("Escape")
    page.locator(".tab", has_text="Overview").click()
    first = page.locator(".pod .chart", has_text="CPU").locator(".line").element_handle()
    page.wait_for_function("(line) => line.getAttribute('d').split('L').length > 3", arg=first)
    drawn = first.get_attribute("d")
    page.wait_for_function("([line, before]) => line.getAttribute('d') !== before", arg=[first, drawn])

    cri.remove_pod(pod)
    page.wait_for_selector(".badge[data-state=gone]")
