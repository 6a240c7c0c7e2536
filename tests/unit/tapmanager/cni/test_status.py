"""tapmanager asks plugins for their status in the background, once for each question."""

from __future__ import annotations

import threading

from podclient import wait_until

from tapmanager.cni.conf import NetworkConf
from tapmanager.cni.status import PluginStatus


def conf(name: str) -> NetworkConf:
    return NetworkConf(name, "1.1.0", ({"type": "x"},))


class Plugins:
    """Answer when they are let."""

    def __init__(self) -> None:
        self.conf = conf("one")
        self.asked: list[str] = []
        self.answers = threading.Semaphore(0)

    def load(self) -> NetworkConf:
        return self.conf

    def status(self, asked: NetworkConf) -> str:
        self.asked.append(asked.name)
        assert self.answers.acquire(timeout=60)
        return f"{asked.name} is away"


def test_a_status_request_during_a_running_check_starts_no_second_check() -> None:
    plugins = Plugins()
    status = PluginStatus(plugins, interval=600.0)  # type: ignore[arg-type]
    status.start()
    try:
        wait_until(lambda: plugins.asked, 60, "the plugins are asked")
        assert status.trouble() == ""
        plugins.answers.release()
        wait_until(lambda: status.trouble() == "one is away", 60, "their answer is there")
        plugins.conf = conf("two")
        plugins.answers.release(9)
        wait_until(lambda: status.trouble() == "two is away", 60, "the changed configuration's answer is there")
        assert plugins.asked == ["one", "two"]
    finally:
        status.stop()


def test_plugins_are_asked_again_after_an_unexpected_error() -> None:
    class Failing(Plugins):
        def status(self, asked: NetworkConf) -> str:
            self.asked.append(asked.name)
            if len(self.asked) == 1:
                raise RuntimeError("can't start new thread")
            return "it is away"

    status = PluginStatus(Failing(), interval=0.01)  # type: ignore[arg-type]
    status.start()
    try:
        wait_until(lambda: status.trouble() == "it is away", 60, "they are asked again")
    finally:
        status.stop()
