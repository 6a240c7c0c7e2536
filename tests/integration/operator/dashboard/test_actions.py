"""In the browser, the page asks before each action on a VM, and the action happens once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from fakes.dashboard_node import DashboardNode, FakePod
from podclient import wait_until

from virtshim.cri.client import MARK

pytestmark = pytest.mark.operator


def opened(page: Any, node: DashboardNode, **more: Any) -> FakePod:
    """A VM, shown by the page."""
    made = node.add("web", labels={MARK: "1"}, **more)
    page.locator(".row").click()
    page.wait_for_selector(".badge[data-state=running]")
    return made


def button(page: Any, name: str) -> Any:
    return page.locator(f".actions [data-action={name}]")


def answer(page: Any, name: str) -> None:
    """Chooses an action and confirms it."""
    button(page, name).click()
    page.locator("dialog.ask .main").click()


def test_an_action_happens_after_its_question_is_confirmed(page: Any, node: DashboardNode) -> None:
    opened(page, node)
    button(page, "reset").click()
    page.wait_for_selector("dialog.ask:has-text('Reset default/web?'):has-text('loses all data')")
    assert page.evaluate("document.activeElement.textContent") == "Cancel"
    page.keyboard.press("n")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog.ask", state="detached")
    button(page, "reset").click()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.ask", state="detached")
    page.wait_for_selector("h1:has-text('web')")
    assert node.acted == []
    answer(page, "reset")
    page.wait_for_selector(".result:has-text('Reset: reset is done')")
    answer(page, "reboot")
    page.wait_for_selector(".result:has-text('Reboot: reboot is done')")
    assert node.acted == ["reset", "reboot"]


def test_a_paused_vm_can_be_resumed_and_not_reset(page: Any, node: DashboardNode) -> None:
    opened(page, node)
    assert not button(page, "resume").is_visible()
    answer(page, "pause")
    page.wait_for_selector(".badge[data-state=paused]")
    button(page, "resume").wait_for()
    assert not button(page, "pause").is_visible()
    assert button(page, "reset").is_disabled()
    answer(page, "resume")
    page.wait_for_selector(".badge[data-state=running]")
    button(page, "pause").wait_for()
    assert button(page, "reset").is_enabled()
    assert node.acted == ["pause", "resume"]


def test_a_double_click_acts_once(page: Any, node: DashboardNode) -> None:
    opened(page, node)
    button(page, "reset").dblclick()
    page.locator("dialog.ask").wait_for()
    # As if the question had opened below the pointer.
    page.locator("dialog.ask .main").dispatch_event("click", {"detail": 2})
    assert page.locator("dialog.ask[open]").count() == 1
    assert node.acted == []
    page.locator("dialog.ask .main").dblclick()
    page.wait_for_selector(".result:has-text('Reset: reset is done')")
    answer(page, "reboot")
    page.wait_for_selector(".result:has-text('Reboot: reboot is done')")
    assert node.acted == ["reset", "reboot"]


def test_a_second_action_waits_for_the_first(page: Any, node: DashboardNode) -> None:
    opened(page, node)
    node.goes_on.clear()
    answer(page, "reset")
    page.wait_for_selector(".result[data-kind=busy]:has-text('Reset …')")
    assert all(button(page, name).is_disabled() for name in ("pause", "reboot", "reset", "stop"))
    node.goes_on.set()
    page.wait_for_selector(".result[data-kind=fine]")
    assert button(page, "reset").is_enabled()


def test_the_dashboard_ends_at_once_while_an_action_waits(page: Any, node: DashboardNode, dashboard: Any) -> None:
    opened(page, node)
    node.goes_on.clear()
    answer(page, "reset")
    page.wait_for_selector(".result[data-kind=busy]")
    wait_until(lambda: node.acted == ["reset"], 60, "the node has the call")
    dashboard.process.send_signal(signal.SIGINT)
    assert dashboard.process.wait(20) == 0
    node.goes_on.set()
    page.wait_for_selector(".result[data-kind=bad]:has-text('look at the VM')")


def test_a_refused_action_says_why(page: Any, node: DashboardNode) -> None:
    opened(page, node)
    node.refusal = "container c0de has a command; <b>stop</b> it instead"
    answer(page, "reset")
    page.wait_for_selector(".result[data-kind=bad]:has-text('Reset failed: container c0de has a command; <b>stop</b>')")
    assert button(page, "reset").is_enabled()
    node.stop()
    page.wait_for_function("() => [...document.querySelectorAll('.actions button')].every((one) => one.disabled)")


def test_stop_ends_a_vm_of_run(page: Any, node: DashboardNode) -> None:
    opened(page, node)
    answer(page, "stop")
    page.wait_for_selector(".badge[data-state=exited]")
    page.wait_for_selector(".result:has-text('Stop: its guest has shut down')")
    assert node.acted == ["stop within 30 s"]
    assert not button(page, "stop").is_visible()


def test_stop_of_a_pod_of_kubernetes_names_kubectl_and_does_nothing(page: Any, node: DashboardNode) -> None:
    node.add("db", "shop")
    page.locator(".row").click()
    button(page, "stop").click()
    page.wait_for_selector("dialog.ask:has-text('kubectl delete pod -n shop db')")
    assert page.locator("dialog.ask .main").count() == 0
    page.locator("dialog.ask button").click()
    page.wait_for_selector("dialog.ask", state="detached")
    assert node.acted == []


def test_a_screenshot_is_saved_without_a_question(page: Any, node: DashboardNode, tmp_path: Path) -> None:
    opened(page, node, screen=True)
    with page.expect_download() as download:
        button(page, "screenshot").click()
    assert download.value.suggested_filename == "web.png"
    assert Path(download.value.path()).read_bytes() == node.picture


def test_a_vm_without_a_screen_has_no_screenshot(page: Any, node: DashboardNode) -> None:
    made = opened(page, node)
    assert not button(page, "screenshot").is_visible()
    node.end(made)
    page.wait_for_selector(".badge[data-state=exited]")
    wait_until(lambda: page.locator(".actions button:visible").count() == 0, 60, "an ended VM has no actions")
